"""Dispatch and combine in the call shapes of MAX's expert-parallel kernels, over ferry.Exchange.

    exchange = ferry.max.Exchange(ferry.Group.torch(), experts=256, top_k=8, hidden=7168, max_tokens=4096)
    received = exchange.ep_fused_dispatch(x, topk_ids)
    rows = experts(received.output_tokens, received.row_offsets, received.expert_ids)
    y = exchange.ep_fused_combine(rows, received.src_info, received.row_offsets, received.counts,
                                  router_weights=weights)

Arrays are of NumPy or PyTorch, in host memory; with a backend of device memory they are tensors on the rank's GPU, and calls are
enqueued on the current stream. docs/guides/max.md has the shapes.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any, NamedTuple

import numpy as np

import ferry
from ferry import _core
from ferry._call_shapes import (SharedByCopies, delivered_call, in_words, integer, naming, raise_refusal, refusing_construction,
                                refusing_misfits)
from ferry._max_device import DeviceLane, typed
from ferry.deep_ep._arrays import arrays_of

__all__ = ["DispatchResult", "Exchange", "group_index"]


class DispatchResult(NamedTuple):
    """What a rank has received. The rows and tile_offsets are in the lane's memory until its next dispatch; the rest are new
    arrays.

    On device memory arrays have the lengths that they can need, because the host does not know how many rows there are: rows and
    src_info have the capacity, row_offsets groups + 1 entries, of which those from `number` on are the number of rows, and
    expert_ids groups entries, -1 from `number` on.
    """

    output_tokens: Any
    """[rows, H]. Groups are the shared experts, then this rank's experts; their rows are in the order of source rank,
    token, slot."""
    output_scales: Any
    """Scales of the rows' blocks in formats that have them, as ferry.DispatchResult.scales: those of `rows` rows, or of
    tile_offsets[-1] rows of tiles; else None."""
    row_offsets: Any
    """uint32 [number + 1]: first row of each group that has rows, then the number of rows."""
    expert_ids: Any
    """int32 [number]: those groups, ascending. Without shared experts these are local expert ids."""
    expert_usage_stats: Any
    """uint32 [2]: the most rows of a group, and the number of groups that have rows."""
    src_info: Any
    """int32 [rows, 2]: token and slot of each row at its source rank; -1, -1 on padding; slot top_k + s for shared expert s."""
    counts: Any
    """int32 [groups, R]: rows of each group from each source rank."""
    parts: tuple[Any, ...]
    """All parts of the rows: (output_tokens,), (output_tokens, output_scales), with 'nvfp4-token' also the rows' scales, or the
    raw parts."""
    tile_offsets: Any
    """Scales as tiles: int32 [groups + 1], the first row of tiles of each group in output_scales; else None."""


def group_index(counts: Any, alignment: int = 1) -> tuple[Any, Any]:
    """(row_offsets, expert_ids) of the groups that have rows: counts [2, 0, 3] give [0, 2, 5] and [0, 2].

    Every group begins at a multiple of `alignment`. Arrays of NumPy, uint32 and int32.
    """
    offsets, ids = _core._max_group_index([int(count) for count in counts], alignment)
    return np.array(offsets, np.uint32), np.array(ids, np.int32)


class _Lane:
    """What a lane keeps from call to call."""

    def __init__(self, exchange: ferry.Exchange):
        self.pending = ""
        self.topk_ids = np.zeros((0, exchange.config.top_k), np.int64)
        self.combine = 0  # call number of the last one
        self.plan_memory = np.zeros(exchange.plan_bytes, np.uint8)
        self.row_tags = np.zeros(exchange.capacity, np.float32)
        self.exchange = exchange

    def keep(self, topk_ids: Any, lane: int) -> None:
        """Keeps the ids of a dispatch for the combine."""
        self.topk_ids = _host(topk_ids).astype(np.int64)

    def describe(self, received: ferry.DispatchResult, lane: int) -> tuple[Any, ...]:
        """The fields of a DispatchResult."""
        total, groups, like = received.wait_total(), len(received.counts), arrays_of(received.data)
        offsets, ids, stats = np.zeros(groups + 1, np.uint32), np.zeros(groups, np.int32), np.zeros(2, np.uint32)
        info, counts = np.zeros((total, 2), np.int32), np.zeros((groups, self.exchange.ranks), np.int32)
        _core._max_describe_rows(self.exchange, lane, received, *(array.ctypes.data for array in (offsets, ids, stats, info, counts)), 0)
        made: tuple[Any, ...] = offsets[:stats[1] + 1], ids[:stats[1]], stats, info, counts
        if like is not arrays_of(offsets):
            made = tuple(map(like.torch.from_numpy, made))
        lengths = [total] * len(received.parts)
        if received.tile_offsets is not None:
            lengths[1] = int(received.tile_offsets[-1])  # rows of tiles
        parts = tuple(part[:length] for part, length in zip(received.parts, lengths))
        return parts[0], None if received.scales is None else parts[1], *made, parts, received.tile_offsets

    def plan(self, src_info: Any, row_offsets: Any, counts: Any, topk_ids: Any, lane: int, like: Any) -> tuple[Any, Any]:
        """The plan of a combine, and the tags that travel with its rows."""
        config, ids = self.exchange.config, np.ascontiguousarray(self.topk_ids)
        if topk_ids is not None:
            ids = _dense("topk_ids", topk_ids, ("int32", "int64"), (None, config.top_k)).astype(np.int64)
        arrays = (_dense("src_info", src_info, ("int32",), (None, 2)), _dense("row_offsets", row_offsets, ("uint32",), (None,)),
                  _dense("counts", counts, ("int32",), (None, self.exchange.ranks)))
        self.combine = _core._max_next_call(self.exchange, lane)
        _core._max_plan_return(
            self.exchange, lane, *(array.ctypes.data for array in arrays), tuple(array.size for array in arrays), ids.ctypes.data, True,
            len(ids), 0, self.plan_memory.ctypes.data, self.row_tags.ctypes.data, 0, self.combine, 0)
        tags = self.row_tags[:arrays[1][-1]]
        framework = arrays_of(like)
        return self.exchange.plan_over(self.plan_memory), tags if framework is arrays_of(tags) else framework.torch.from_numpy(tags)

    def check(self, returned: Any, lane: int) -> None:
        """Raises UsageError if a row has not come back."""
        dense = np.ascontiguousarray(_host(returned))
        _core._max_check_returned(self.exchange, lane, self.plan_memory.ctypes.data, dense.ctypes.data, self.combine, 0)


class Exchange(SharedByCopies):
    """Dispatch and combine for one configuration; combine takes src_info, row_offsets and counts in place of a plan.

    Collective: every rank constructs it and makes the same calls of a lane in the same order. The async calls send and wait
    for no peer; the wait calls return when this rank's result is complete.

    If an argument of one rank is wrong, every rank raises UsageError and the exchange stays usable. If ranks pass arrays of
    different dispatches, the rank that misses a row raises it when the combine is complete.
    """

    @refusing_misfits("reduction")
    def __init__(self, group: ferry.Group | ferry.Rank, *, experts: int, top_k: int, hidden: int, max_tokens: int,
                 reduction: str = "exact", skip_a2a: bool = False, allreduce_world_size: int = 1, **settings: Any):
        """`reduction`: 'exact' (combine returns [N, H]) or 'unreduced' ([N, K, H]). `settings`: as of ferry.Exchange, apart
        from layout, capacity, repeats, own_receive_buffers and check_calls; transfer is 'routed'.

        skip_a2a              every rank passes the same tokens and ids, and nothing travels. Combine returns the sum of this
                              rank's experts' rows: add those of the ranks by an all-reduce
        allreduce_world_size  with skip_a2a and shared experts W: ranks r < W take tokens [r*N/W, (r+1)*N/W) as their rows of
                              shared experts. 0: every rank takes all
        """
        with refusing_construction(group):
            with naming("skip_a2a"):
                skip_a2a = bool(skip_a2a)
            if not isinstance(reduction, str) or reduction not in (("exact",) if skip_a2a else ("exact", "unreduced")):
                known = "left out with skip_a2a" if skip_a2a else "'exact' or 'unreduced'"
                raise ferry.UsageError(f"max: reduction {reduction!r}, must be {known}")
            for name in ("layout", "capacity", "repeats", "own_receive_buffers", "check_calls"):
                if name in settings:
                    raise ferry.UsageError(f"max: {name} = {settings[name]!r}: leave it out, ferry.max sets it")
            for name in ("input", "shared_split"):
                if name in settings:
                    raise ferry.UsageError(f"max: {name} = {settings[name]!r}: leave it out, and pass skip_a2a=True, with "
                                           "allreduce_world_size, where all ranks have the same tokens")
            if str(settings.get("transfer", "routed")) != "routed":
                raise ferry.UsageError(f"max: transfer = {settings['transfer']!r}, must be 'routed': use ferry.Exchange with its plans")
            if getattr(settings.get("placement"), "has_replicas", False):
                raise ferry.UnsupportedError("max: a placement with replicas is not supported: use ferry.Exchange with its plans")
            if getattr(settings.get("placement"), "tp", 1) > 1:
                raise ferry.UnsupportedError("max: experts in slices are not supported: use ferry.Exchange with its plans")
            split = integer("max: allreduce_world_size", allreduce_world_size)
            if skip_a2a:
                with naming("shared_experts"):
                    settings |= {"input": "replicated", "shared_split": split if settings.get("shared_experts") else 0}
                reduction = "partial"
        with in_words(_core._MAX_WORDS):
            self._exchange = ferry.Exchange(group, experts=experts, top_k=top_k, hidden=hidden, max_tokens=max_tokens,
                                            reduction=reduction, repeats=True, **settings)  # type: ignore[arg-type]
        lane_type = DeviceLane if self._exchange.config.memory == "device" else _Lane
        self._lanes: list[Any] = [lane_type(self._exchange) for _ in range(self._exchange.config.lanes)]

    @property
    def config(self) -> ferry.Config:
        """With every default filled in."""
        return self._exchange.config

    @refusing_misfits("input_tokens")
    def ep_dispatch_async(self, input_tokens: Any, topk_ids: Any, *, format: str | None = None, global_scale: Any = None,
                          input_scales: Any = None, lane: int = 0) -> None:
        """Sends input_tokens [N, H] to the ranks of their experts, topk_ids [N, K]; -1 masks a slot.

        format          of this call; default: the exchange's. For 'raw:' input_tokens is a tuple of the parts
        global_scale    'nvfp4': g, a number or float32 [1], on GPUs an array there; default 1. Values are element * scale * g
        input_scales    'fp8', 'mxfp8' and 'nvfp4': float32 [experts + shared_experts], a scale of each expert. Tokens travel as
                        they are, and each rank encodes the rows it receives: the exchange's format is that of the tokens
        """
        kept = self._idle(lane, "dispatch")
        with in_words(_core._MAX_WORDS):
            self._exchange.dispatch_send(input_tokens, topk_ids, format=format, global_scale=global_scale,
                                         input_scales=input_scales, lane=lane)
        kept.keep(topk_ids, lane)
        kept.pending = "dispatch"

    @refusing_misfits("lane")
    def ep_dispatch_wait(self, *, lane: int = 0) -> DispatchResult:
        """What the ranks have sent to this one."""
        kept = self._end(lane, "dispatch")
        with in_words(_core._MAX_WORDS):
            received = self._exchange.dispatch_receive(lane=lane)
        return DispatchResult(*kept.describe(received, lane))

    @refusing_misfits("input_tokens")
    def ep_fused_dispatch(self, input_tokens: Any, topk_ids: Any, *, format: str | None = None, global_scale: Any = None,
                          input_scales: Any = None, lane: int = 0) -> DispatchResult:
        """ep_dispatch_async() and ep_dispatch_wait() in one call."""
        kept = self._idle(lane, "dispatch")
        before = delivered_call(self._exchange, lane)
        try:
            with in_words(_core._MAX_WORDS):
                received = self._exchange.dispatch(input_tokens, topk_ids, format=format, global_scale=global_scale,
                                                   input_scales=input_scales, lane=lane)
        except ferry.Error:  # such as ids out of range, of a dispatch that has delivered its rows
            if delivered_call(self._exchange, lane) not in (0, before):
                kept.keep(topk_ids, lane)
            raise
        kept.keep(topk_ids, lane)
        return DispatchResult(*kept.describe(received, lane))

    def last_dispatch_result(self, *, lane: int = 0) -> DispatchResult:
        """The result of the lane's last dispatch, also if that has delivered its rows and raised, as for ids out of range."""
        return DispatchResult(*self._lane(lane, "last_dispatch_result").describe(self._exchange.last_dispatch_result(lane), lane))

    @refusing_misfits("input_tokens")
    def ep_combine_async(self, input_tokens: Any, src_info: Any, row_offsets: Any, counts: Any, *, topk_ids: Any = None,
                         router_weights: Any = None, output_tokens: Any = None, shared_outputs: Any = None,
                         residual: Any = None, scale: float = 1.0, lane: int = 0) -> None:
        """Returns every row of input_tokens [rows, H] to the rank, token and slot it came from.

        src_info, row_offsets, counts   of the dispatch's result
        topk_ids        [N, K], the ids of the dispatch; default: of the lane's last dispatch
        router_weights  float32 [N, K]; default: every weight is 1. Not with 'unreduced'
        output_tokens   to write to; default: a new array of input_tokens' type
        shared_outputs  [shared_experts, N, H]: takes the outputs of the shared experts, which are then not added
        residual, scale [N, H] of the result's type: the result is multiplied by scale and added to it. Not with 'unreduced'
        """
        kept, arguments = self._arguments(input_tokens, src_info, row_offsets, counts, topk_ids, router_weights, output_tokens,
                                          shared_outputs, residual, scale, lane)
        with in_words(_core._MAX_WORDS):
            self._exchange.combine_send(input_tokens, **arguments)
        kept.pending = "combine"

    @refusing_misfits("lane")
    def ep_combine_wait(self, *, lane: int = 0) -> Any:
        """The result of the lane's combine: [N, H], or 'unreduced' [N, K, H]."""
        kept = self._end(lane, "combine")
        return self._checked(kept, lane, lambda: self._exchange.combine_receive(lane=lane))

    @refusing_misfits("input_tokens")
    def ep_fused_combine(self, input_tokens: Any, src_info: Any, row_offsets: Any, counts: Any, *, topk_ids: Any = None,
                         router_weights: Any = None, output_tokens: Any = None, shared_outputs: Any = None,
                         residual: Any = None, scale: float = 1.0, lane: int = 0) -> Any:
        """ep_combine_async() and ep_combine_wait() in one call."""
        kept, arguments = self._arguments(input_tokens, src_info, row_offsets, counts, topk_ids, router_weights, output_tokens,
                                          shared_outputs, residual, scale, lane)
        return self._checked(kept, lane, lambda: self._exchange.combine(input_tokens, **arguments))

    def synchronize(self, *, lane: int = 0) -> None:
        """Waits for the current stream, on device memory, and raises what has ended a call of the lane."""
        with in_words(_core._MAX_WORDS):
            self._exchange.synchronize(lane=lane)

    def check(self, *, lane: int = 0) -> None:
        """Raises what completed calls have found, as ferry.Exchange.check()."""
        with in_words(_core._MAX_WORDS):
            self._exchange.check(lane=lane)

    def _lane(self, lane: int, call: str) -> Any:
        """What is kept of the lane. If it does not exist, the exchange's `call` ends in its words, also for the peers."""
        with contextlib.suppress(Exception):
            if 0 <= operator.index(lane) < len(self._lanes):
                return self._lanes[lane]
        only = self._lanes[0]
        if len(self._lanes) == 1 and call == f"{only.pending}_receive":  # the receive phase is carried out
            only.pending = ""
        return getattr(self._exchange, call)(lane=lane)

    def _idle(self, lane: int, call: str) -> Any:
        kept = self._lane(lane, call)
        if kept.pending:
            raise ferry.UsageError(f"lane {lane}: call ep_{kept.pending}_wait first")
        return kept

    def _end(self, lane: int, call: str) -> Any:
        kept = self._lane(lane, f"{call}_receive")
        if kept.pending != call:
            raise ferry.UsageError(f"lane {lane}: no {call} to wait for: call ep_{call}_async first")
        kept.pending = ""
        return kept

    def _arguments(self, input_tokens: Any, src_info: Any, row_offsets: Any, counts: Any, topk_ids: Any,
                   router_weights: Any, output_tokens: Any, shared_outputs: Any, residual: Any, scale: float,
                   lane: int) -> tuple[Any, dict[str, Any]]:
        """The arguments of the combine by the plan that the arrays make. If they are wrong, the peers' combine ends too."""
        kept = self._idle(lane, "combine")
        try:
            if input_tokens is None:
                raise ferry.UsageError("input_tokens: None, must be an array of rows")
            with in_words((("tokens = ", "rows of topk_ids = "),)):
                plan, tags = kept.plan(src_info, row_offsets, counts, topk_ids, lane, input_tokens)
            _core._require_apart({"output_tokens": output_tokens, "shared_outputs": shared_outputs},
                                     {"src_info": src_info, "row_offsets": row_offsets, "counts": counts, "topk_ids": topk_ids})
        except BaseException as error:  # a rank that raised alone would leave its peers waiting
            text = f"ep_combine: rank {self._exchange.rank}: {str(error) or repr(error)}"
            self._exchange.refuse(text, lane=lane, operation="combine")
            raise_refusal(text, error)
        return kept, {
            "plan": plan, "topk_weights": router_weights, "result": output_tokens, "row_values": tags,
            "shared_outputs": shared_outputs, "residual": residual, "scale": scale, "lane": lane}

    def _checked(self, kept: Any, lane: int, combine: Any) -> Any:
        """The result of the combine, if every row has come back."""
        try:
            with in_words(_core._MAX_WORDS):
                result, returned = combine()
            kept.check(returned, lane)
        except ferry.BadSourceError:
            raise ferry.UsageError(
                f"ep_combine: rank {self._exchange.rank} has got other rows than its topk_ids say; pass src_info, row_offsets "
                "and counts of one dispatch on every rank, and its topk_ids") from None
        except ferry.UsageError as error:
            text = str(error)
            raise ferry.UsageError(text if "ep_combine: " in text else f"ep_combine: {text}") from None
        return result


def _host(array: Any) -> Any:
    """The array as one of NumPy."""
    return np.asarray(array)


def _dense(name: str, array: Any, types: tuple[str, ...], shape: tuple[int | None, ...]) -> Any:
    """A dense NumPy array over `array`, whose type and shape are checked."""
    with naming(name):
        return np.ascontiguousarray(_host(typed(name, array, types, shape)))
