"""What a call of HybridEPBuffer sends where: its rows, routes and probabilities, read and checked."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import ferry
from ferry.deep_ep import _arguments, _layout
from ferry.deep_ep._arguments import integer
from ferry.deep_ep._arrays import arrays_of
from ferry.deep_ep._rows import Rows

BLOCK = 128  # columns of a scaling factor

read_array = functools.partial(_arguments.read_array, first="hidden")


def rows_of(hidden: Any, scaling_factor: Any, tokens: int | None = None, columns: int | None = None) -> Rows:
    """The Rows of bfloat16 [T, H], or of fp8 or bytes with `scaling_factor`, float32 [T, H / 128]."""
    arrays = arrays_of(hidden)
    hidden = read_array("hidden", hidden, arrays, ("bfloat16", "float8_e4m3fn", "uint8"), (tokens, columns))
    count, width = hidden.shape
    unit = 8 if arrays.type_name(hidden) == "bfloat16" else BLOCK
    if width == 0 or width % unit != 0:
        raise ferry.UsageError(f"hidden: expected a multiple of {unit} columns, got {width}")
    if unit == 8:
        return Rows(arrays, hidden)
    if scaling_factor is None:
        raise ferry.UsageError(f"scaling_factor: fp8 rows need it, float32 [{count}, {width // BLOCK}]")
    return Rows(arrays, hidden, read_array("scaling_factor", scaling_factor, arrays, ("float32",), (count, width // BLOCK)))


@dataclasses.dataclass
class Routes:
    """Where a rank's tokens go. `ids`: int32 [T, K], ascending experts, and -1 where a token has fewer."""

    ids: Any
    experts: int
    left_out: Any  # int32 [T], not negative where a token has more than K; None where none can

    @staticmethod
    def of(arrays: Any, routing_map: Any, tokens: int, slots: int) -> Routes:
        """`routing_map`: bool [T, E]. `slots`: the most experts of a token, if the caller knows it."""
        routing_map = read_array("routing_map", routing_map, arrays, ("bool",), (tokens, None))
        ids, left_out = _layout.ids_from_map(arrays, routing_map, min(slots, _layout.MOST_SLOTS))
        return Routes(ids, routing_map.shape[1], left_out)

    def require_slots(self) -> None:
        """UnsupportedError if a token has more experts than K. Waits for the device."""
        if self.left_out is not None and len(self.left_out) and int(self.left_out.max()) >= 0:
            raise ferry.UnsupportedError(f"routing_map: a token goes to more than {self.ids.shape[1]} experts")

    def by_slot(self, arrays: Any, probs: Any) -> Any:
        """float32 [T, K] of probs float32 [T, E], or None."""
        if probs is None:
            return None
        return arrays.gathered(self.ids, read_array("probs", probs, arrays, ("float32",), (len(self.ids), self.experts)))


def indices_to_map(topk_idx: Any, topk_weights: Any, num_of_tokens: int, num_of_experts: int) -> tuple[Any, Any]:
    """(routing_map bool [T, E], probs float32 [T, E] or None) of topk_idx [T, K], -1 for a masked slot.

    Without topk_weights probs is None. An id out of range raises UsageError; on GPUs it is skipped.
    """
    arrays = arrays_of(topk_idx)
    topk_idx = read_array("topk_idx", topk_idx, arrays, ("int32", "int64"), (num_of_tokens, None))
    experts = integer("num_of_experts", num_of_experts, 1)
    outside = (topk_idx < -1) | (topk_idx >= experts)
    if not arrays.on_device and bool(outside.any()):
        token, slot = divmod(int(arrays.to(outside, "int32").reshape(-1).argmax()), topk_idx.shape[1])
        raise ferry.UsageError(
            f"topk_idx: token {token} has {int(topk_idx[token, slot])} in slot {slot}, must be from -1 to {experts - 1}")
    ids = arrays.where(~outside, topk_idx, -1)
    routing_map = arrays.scattered(ids, ids == ids, experts)
    if topk_weights is None:
        return routing_map, None
    weights = read_array("topk_weights", topk_weights, arrays, ("float32",), tuple(topk_idx.shape))
    return routing_map, arrays.scattered(ids, weights, experts)
