"""The calls of a HybridEPBuffer: which exchange they use, the arrays that they receive in, and their handles."""

from __future__ import annotations

import collections.abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import ferry
from ferry._call_shapes import Unreadable, in_words
from ferry.deep_ep._agreement import AgreeingExchanges, must_agree
from ferry.deep_ep._config import normal_settings
from ferry.deep_ep._exchanges import (
    HYBRID_COMBINE,
    HYBRID_CONSTRUCTION,
    HYBRID_DISPATCH,
    HYBRID_DISPATCH_AGAIN,
    REFUSED_FIRST,
    ROUNDING,
    made_or_refused,
    require_same,
)
from ferry.deep_ep._hybrid_config import HybridEpConfigInstance
from ferry.deep_ep._hybrid_routes import Routes
from ferry.deep_ep._rows import Received, Rows

# Ferry's words, and those of the interface.
WORDS = ((": format is ", ": hidden is "), ("tokens:", "hidden:"), ("outputs:", "hidden:"), ("row_values:", "probs:"))


class Shape(NamedTuple):
    """What dispatches of one exchange have in common on all ranks."""

    alignment: int  # of the rows of each expert; 0: rows are not permuted
    hidden: int
    experts: int
    slots: int


NAMES = ("pad_multiple", "the columns of hidden", "the number of experts", "the most experts of a token")
_Result = TypeVar("_Result")


class HybridExchanges(AgreeingExchanges):
    """The exchanges behind a HybridEPBuffer, one for each shape of dispatch."""

    def __init__(self, group: ferry.Group | ferry.Rank, device_engine: str, error: BaseException | None):
        """Collective. `error`: what was wrong with this rank's arguments. If one rank has an error, every rank raises."""
        super().__init__(group, device_engine)
        self._shape: Shape | None = None  # of the last dispatch with new routes
        self._construct(HYBRID_CONSTRUCTION, (0,), error)

    def run(self, shape: Shape, room: int, on_device: bool, operate: Callable[[ferry.Exchange], _Result]) -> _Result:
        """Collective: operate(exchange) for new routes of `shape`, with an exchange for at least `room` tokens of every rank.

        Ranks that the last exchange serves go ahead. Where it does not serve a peer, that rank gathers, and all agree on one.
        """
        if self._shape == shape and room <= self._last.config.max_tokens:
            try:
                return operate(self._last)
            except ferry.UsageError as refusal:
                if not must_agree(refusal):
                    raise
            self._leave_calls(but=self._last)
        else:
            self._leave_calls()
        self._agree(on_device, room, shape)
        return operate(self._last)

    def refuse_dispatch(self, error: BaseException, blocking: bool) -> None:
        """Raises `error`, what was wrong in a dispatch with new routes, and ends the peers' calls with it."""
        if blocking:  # on GPUs, too, the peers' hosts wait
            self._leave_calls()
            self._gather(HYBRID_DISPATCH, (REFUSED_FIRST,), error)
        self.refuse(HYBRID_DISPATCH, error)

    def _agree(self, on_device: bool, room: int, shape: Shape) -> None:
        gathered = self._gather(HYBRID_DISPATCH, (room, *shape))
        require_same("dispatch", NAMES, [theirs for _, *theirs in gathered])
        most = max(theirs for theirs, *_ in gathered)
        made = self._made.get(shape, [])
        if not made or made[0].config.max_tokens < most:
            # Handles keep the smaller exchange alive as long as they need it.
            rounded = -(-most // ROUNDING) * ROUNDING if made else max(1, most)
            made = self._made[shape] = [self._make_on(on_device, _settings(shape, rounded))]
        self._last, self._shape = made[0], shape


def _settings(shape: Shape, most: int) -> dict[str, Any]:
    settings = normal_settings(most, *shape[1:])
    if shape.alignment == 0:
        return settings
    return settings | {"layout": "expert_major", "alignment": shape.alignment, "zero_padding": True}


@dataclasses.dataclass
class Dispatch:
    """A dispatch with new routes, read."""

    rows: Rows
    routes: Routes
    weights: Any  # float32 [T, K] or None
    alignment: int  # as of Shape
    blocking: bool
    limit: int | None  # num_permuted_tokens
    config: HybridEpConfigInstance

    @property
    def shape(self) -> Shape:
        return Shape(self.alignment, self.rows.hidden, self.routes.experts, self.routes.ids.shape[1])


_ELEMENTS = ("sparse_to_dense_map", "rdma_to_attn_map", "attn_to_rdma_map", "num_dispatched_tokens_tensor",
             "local_expert_routing_map", "num_of_tokens_per_rank", "config")
_PERMUTED_ELEMENTS = (*_ELEMENTS[:5], "dense_chunk_layout", "dense_to_expert_map", "tokens_per_expert", *_ELEMENTS[5:],
                      "overflow_flag")
_OF_KERNELS = {"sparse_to_dense_map", "rdma_to_attn_map", "attn_to_rdma_map", "dense_chunk_layout", "dense_to_expert_map"}


class Handle(collections.abc.Sequence[Any]):
    """What a dispatch returns for later calls, with the elements of Hybrid-EP's tuples: 7, or permuted 11.

    They are computed on access. Those that only Hybrid-EP's kernels read raise UnsupportedError when they are used.
    """

    def __init__(self, owner: HybridExchanges, call: Dispatch, exchange: ferry.Exchange, received: Received, plan: ferry.Plan,
                 groups: tuple[Any, Any]):
        """`groups`: counts and row_offsets of the dispatch."""
        self.owner, self.exchange, self.plan, self.arrays = owner, exchange, plan, call.rows.arrays
        self.routes, self.config = call.routes, call.config
        self.permuted, self.limit = call.alignment > 0, call.limit
        self.rows, self.local_ids = received.rows, received.ids
        self._counts, self._offsets = groups
        self._names = _PERMUTED_ELEMENTS if self.permuted else _ELEMENTS

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self._element(name) for name in self._names[index])
        return self._element(self._names[index])

    def _element(self, name: str) -> Any:
        if name in _OF_KERNELS or self.permuted and name == "local_expert_routing_map":
            return Unreadable(ferry.UnsupportedError(f"handle: Ferry has no {name}, which only Hybrid-EP's kernels read"))
        return getattr(self, name)

    @property
    def num_of_tokens_per_rank(self) -> int:
        return self.plan.tokens

    @property
    def num_dispatched_tokens_tensor(self) -> Any:
        """int32 [1]: tokens received. On the host if rows are not permuted."""
        if not self.permuted:
            return self.arrays.from_list([self.rows], "int32")
        return self.arrays.to(self.plan.tokens_between[:, self.exchange.rank].sum().reshape(1), "int32")

    @property
    def local_expert_routing_map(self) -> Any:
        """bool [rows, L]: the experts of this rank that each received token goes to."""
        ids = self.local_ids[: self.rows]
        return self.arrays.scattered(ids, ids == ids, local_experts(self.exchange))

    @property
    def padded_tokens_per_expert(self) -> Any:
        """int64 [L], where the rows lie: rows of each expert with its padding; dropped rows do not count."""
        ends = self._offsets if self.limit is None else self._offsets.clip(max=self.limit)
        return self.arrays.to(ends[1:] - ends[:-1], "int64")

    @property
    def tokens_per_expert(self) -> Any:
        """int32 [L], where the rows lie: rows of each expert without padding; dropped rows do not count."""
        return self.arrays.module.minimum(self._counts, self.arrays.to(self.padded_tokens_per_expert, "int32"))

    @property
    def overflow_flag(self) -> Any:
        """int32 [1], where the rows lie: 1 if rows were dropped."""
        total = self._offsets[-1:]
        dropped = total > (total if self.limit is None else self.limit)
        if self.routes.left_out is not None and len(self.routes.left_out):
            dropped = dropped | (self.routes.left_out >= 0).any()
        return self.arrays.to(dropped, "int32")


def local_experts(exchange: ferry.Exchange) -> int:
    return len(exchange.config.placement.experts_of(exchange.rank))


class Calls:
    """The calls of one HybridEPBuffer. `sms`: the most SMs of a dispatch and of a combine; 0: no limit."""

    def __init__(self, exchanges: HybridExchanges, sms: tuple[int, int]):
        self.exchanges = exchanges
        self._sms = sms

    def dispatch(self, call: Dispatch) -> tuple[Any, ...]:
        """(hidden, weight, scaling_factor, tokens_per_expert, handle). Collective."""
        room = max(call.rows.tokens, call.config.max_num_of_tokens_per_rank)
        on_device = call.rows.arrays.on_device
        limit = call.limit
        if limit is not None and not call.blocking:
            return self.exchanges.run(call.shape, room, on_device, lambda exchange: self._deliver(exchange, call, limit))
        exchange, (total, routes, _) = self.exchanges.run(
            call.shape, room, on_device, lambda exchange: (exchange, exchange.dispatch_counts(call.routes.ids)))
        rows = total if limit is None else limit
        *results, _, handle = self._deliver(exchange, call, rows)
        return *results, call.rows.arrays.from_list(rows_of_experts(routes, call.alignment, rows), "int64"), handle

    def _deliver(self, exchange: ferry.Exchange, call: Dispatch, rows: int) -> tuple[Any, ...]:
        arrays, like = call.rows.arrays, call.routes.ids
        groups = local_experts(exchange) if call.alignment else exchange.ranks

        def make() -> tuple[Any, ...]:
            counts, offsets = arrays.empty((groups,), "int32", like), arrays.empty((groups + 1,), "int32", like)
            received = Received(exchange, call.rows, rows, call.weights is not None)
            memory = received.memory(counts=counts, row_offsets=offsets, allow_truncation=call.limit is not None)
            return received, memory, (counts, offsets)

        received, memory, of_groups = made_or_refused(exchange, "dispatch", make)
        plan = self._send(exchange, call.rows, call.routes.ids, call.weights, memory).plan
        plan.set_row_bound(rows)
        handle = Handle(self.exchanges, call, exchange, received, plan, of_groups)
        return *results_of(call.rows, received), handle.padded_tokens_per_expert if call.alignment else None, handle

    def dispatch_again(self, handle: Handle, rows: Rows, weights: Any) -> tuple[Any, ...]:
        """(hidden, weight, scaling_factor) of new tokens on the routes of a handle. Collective."""
        exchange = handle.exchange
        # A dispatch by a plan may write padding past the limit, and takes weights for the capacity only.
        by_plan = handle.limit is None and weights is None

        def make() -> tuple[Any, ...]:
            received = Received(exchange, rows, handle.rows, weights is not None)
            memory = ferry.ReceiveBuffers(received.parts) if by_plan else received.memory(allow_truncation=handle.limit is not None)
            return received, memory

        received, memory = made_or_refused(exchange, "dispatch", make)
        with self.exchanges.call(exchange, HYBRID_DISPATCH_AGAIN):
            self._send(exchange, rows, handle.plan if by_plan else handle.routes.ids, weights, memory)
        return results_of(rows, received)

    def _send(self, exchange: ferry.Exchange, rows: Rows, routes: Any, weights: Any, memory: ferry.ReceiveBuffers) -> ferry.DispatchResult:
        sms = self._sms[0] if rows.arrays.on_device else 0
        with in_words(WORDS):
            return exchange.dispatch(rows.sent(), routes, weights, format=rows.format, memory=memory, sm_limit=sms)

    def combine(self, handle: Handle, hidden: Any, values: Any) -> tuple[Any, Any]:
        """(bfloat16 [T, H], float32 [T, K] or None): the sums of the rows, and `values` of the rows by slot. Collective.

        `values`: float32 [rows], or [rows, K] if the handle's rows are not permuted.
        """
        exchange, arrays = handle.exchange, handle.arrays
        columns = exchange.config.hidden

        def make() -> tuple[Any, ...]:
            result = arrays.empty((handle.plan.tokens, columns), "bfloat16", hidden)
            return result, with_dropped_rows(handle, hidden), with_dropped_rows(handle, values)

        result, rows, row_values = made_or_refused(exchange, "combine", make)
        given = {"row_values": row_values} if values is not None and handle.permuted else {}
        sms = self._sms[1] if arrays.on_device else 0
        by_slot = None if values is None or given else lambda: self.exchanges.combined_weights(handle, values)
        try:
            with self.exchanges.call(exchange, HYBRID_COMBINE), in_words(WORDS):
                combined = exchange.combine(rows, handle.plan, result=result, sm_limit=sms, **given)
        except ferry.BadSourceError:
            if by_slot:
                by_slot()  # the peers' calls go on
            raise
        return combined if given else (combined, by_slot and by_slot())


def results_of(rows: Rows, received: Received) -> tuple[Any, Any, Any]:
    """(hidden, weight, scaling_factor)"""
    made = rows.received(received.parts, received.rows)
    hidden, factors = made if rows.scales else (made, None)
    return hidden, None if received.weights is None else received.weights[: received.rows], factors


def with_dropped_rows(handle: Handle, array: Any) -> Any:
    """The array with as many rows as a combine may read: on the host those of the plan, dropped ones too; on GPUs at least one,
    which has memory even if num_permuted_tokens is 0."""
    if array is None or handle.limit is None:
        return array
    needed = max(1, handle.limit) if handle.arrays.on_device else handle.plan.total
    if len(array) >= needed:
        return array
    longer = handle.arrays.full((needed, *array.shape[1:]), 0, handle.arrays.type_name(array), array)
    longer[: len(array)] = array
    return longer


def rows_of_experts(routes: list[int], alignment: int, limit: int) -> list[int]:
    """Rows of each expert, padding included, of which the first `limit` have memory."""
    ends = [0]
    for count in routes:
        ends.append(ends[-1] + -(-count // max(1, alignment)) * max(1, alignment))
    return [min(end, limit) - min(begin, limit) for begin, end in zip(ends, ends[1:])]
