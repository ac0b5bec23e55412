"""What a call of HybridEPBuffer sends where: its rows, routes and probabilities, read and checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import ferry
from ferry.deep_ep import _layout
from ferry.deep_ep._arrays import arrays_of
from ferry.deep_ep._hybrid_config import integer

ROWS = ("bfloat16", "float8_e4m3fn", "uint8")
BLOCK = 128  # columns of a scaling factor


def checked(arrays: Any, array: Any, name: str, types: tuple[str, ...], shape: tuple[int | str, ...], like: Any = None) -> Any:
    """The array, C-contiguous and without gradients. In `shape` letters stand for any number.

    `like`: an array whose framework and device it must have.
    """
    if not hasattr(array, "shape") or not hasattr(array, "dtype") or arrays_of(array) is not arrays:
        raise ferry.UsageError(f"{name}: expected an array of PyTorch or NumPy, where hidden lies, got {type(array).__name__}")
    if like is not None and getattr(array, "device", None) != getattr(like, "device", None):
        raise ferry.UsageError(f"{name}: expected it on {like.device}, where hidden lies, got {array.device}")
    found, given = arrays.type_name(array), tuple(array.shape)
    fits = len(given) == len(shape) and all(isinstance(want, str) or want == size for want, size in zip(shape, given))
    if found not in types or not fits:
        wanted = f"{' or '.join(types)} [{', '.join(map(str, shape))}]"
        raise ferry.UsageError(f"{name}: expected {wanted}, got {found} {list(given)}")
    return arrays.contiguous(array)


@dataclasses.dataclass
class Rows:
    """The tokens of a call, and the format in which ferry.Exchange sends them."""

    arrays: Any
    parts: tuple[Any, ...]
    format: str
    scales: int = 0  # scaling factors of a token

    @staticmethod
    def of(hidden: Any, scaling_factor: Any, tokens: int | str = "T", columns: int | str = "H") -> Rows:
        """`hidden`: bfloat16 [T, H], or fp8 or bytes with `scaling_factor`, float32 [T, H / 128]."""
        arrays = arrays_of(hidden)
        hidden = checked(arrays, hidden, "hidden", ROWS, (tokens, columns))
        count, width = hidden.shape
        unit = 8 if arrays.type_name(hidden) == "bfloat16" else BLOCK
        if width == 0 or width % unit != 0:
            raise ferry.UsageError(f"hidden: expected a multiple of {unit} columns, got {width}")
        if unit == 8:
            return Rows(arrays, (hidden,), "bf16")
        if scaling_factor is None:
            raise ferry.UsageError(f"scaling_factor: fp8 rows need it, float32 [{count}, {width // BLOCK}]")
        scales = width // BLOCK
        factors = checked(arrays, scaling_factor, "scaling_factor", ("float32",), (count, scales), hidden)
        padded = -(-scales // 4) * 4  # rows of a part are multiples of 16 bytes
        if padded != scales:
            wide = arrays.full((count, padded), 0, "float32", factors)
            wide[:, :scales] = factors
            factors = wide
        return Rows(arrays, (hidden, factors), f"raw:{width}+{4 * padded}", scales)

    @property
    def hidden(self) -> Any:
        return self.parts[0]

    @property
    def tokens(self) -> Any:
        """As Exchange.dispatch takes them."""
        return self.parts if self.scales else self.hidden


@dataclasses.dataclass
class Routes:
    """Where a rank's tokens go. `ids`: int32 [T, K], ascending experts, and -1 where a token has fewer."""

    ids: Any
    experts: int
    left_out: Any  # int32 [T], not negative where a token has more than K; None where none can

    @staticmethod
    def of(routing_map: Any, hidden: Any, slots: int) -> Routes:
        """`routing_map`: bool [T, E]. `slots`: the most experts of a token, if the caller knows it."""
        arrays = arrays_of(hidden)
        routing_map = checked(arrays, routing_map, "routing_map", ("bool",), (len(hidden), "E"), hidden)
        ids, left_out = _layout.ids_from_map(arrays, routing_map, min(slots, _layout.MOST_SLOTS))
        return Routes(ids, routing_map.shape[1], left_out)

    def require_slots(self) -> None:
        """UnsupportedError if a token has more experts than K. Waits for the device."""
        if self.left_out is not None and len(self.left_out) and int(self.left_out.max()) >= 0:
            raise ferry.UnsupportedError(f"routing_map: a token goes to more than {self.ids.shape[1]} experts")


def indices_to_map(topk_idx: Any, topk_weights: Any, num_of_tokens: int, num_of_experts: int) -> tuple[Any, Any]:
    """(routing_map bool [T, E], probs float32 [T, E] or None) of topk_idx [T, K], -1 for a masked slot.

    Without topk_weights probs is None. An id out of range raises UsageError; on GPUs it is skipped.
    """
    arrays = arrays_of(topk_idx)
    topk_idx = checked(arrays, topk_idx, "topk_idx", ("int32", "int64"), (num_of_tokens, "K"))
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
    shape = (num_of_tokens, topk_idx.shape[1])
    weights = checked(arrays, topk_weights, "topk_weights", ("float32",), shape, topk_idx)
    return routing_map, arrays.scattered(ids, weights, experts)
