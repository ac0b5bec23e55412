"""The calls of a HybridEPBuffer: which exchange they use, the arrays that they receive in, and their handles."""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
from typing import Any

import ferry
from ferry._call_shapes import Unreadable, in_words
from ferry._core import _MUST_AGREE
from ferry.deep_ep._config import normal_settings
from ferry.deep_ep._exchanges import (
    HYBRID_CONSTRUCTION, HYBRID_DISPATCH, REFUSED, ROUNDING, GroupExchanges, made_or_refused)
from ferry.deep_ep._hybrid_routes import Routes, Rows

# Ferry's words, and those of the interface.
WORDS = ((": format is ", ": hidden is "), ("tokens:", "hidden:"), ("outputs:", "hidden:"), ("row_values:", "probs:"))
SHAPE = ("pad_multiple", "the columns of hidden", "the number of experts", "the most experts of a token")


class HybridExchanges(GroupExchanges):
    """The exchanges behind a HybridEPBuffer. `current`: that of the last dispatch with new routes, the same on every rank."""

    def __init__(self, group, device_engine, error):
        """Collective. `error`: what was wrong with this rank's arguments. If one rank has an error, every rank raises."""
        super().__init__(group, device_engine)
        self.current = None
        self.last = {}  # by whether rows are permuted, the exchange of the last dispatch with new routes
        self._shape = None
        self._gather(HYBRID_CONSTRUCTION, (0 if error is None else REFUSED,), error)

    def close(self):
        super().close()
        self.current, self.last = None, {}

    def run(self, shape, room, on_device, operate):
        """Collective: operate(exchange) for new routes of `shape`, with an exchange for at least `room` tokens of every rank.

        Ranks whose current exchange serves the call go ahead. If a peer's does not, it refuses, and all agree on a new one.
        """
        if self.current is not None and self._shape == shape and room <= self.current.config.max_tokens:
            try:
                return operate(self.current)
            except ferry.UsageError as refusal:
                if _MUST_AGREE not in str(refusal):
                    raise
        elif self.current is not None:
            self.current.refuse(_MUST_AGREE)
        self._agree(on_device, room, shape)
        return operate(self.current)

    def refuse(self, error, blocking):
        """Takes part in a dispatch with new routes by ending it everywhere; raises `error`."""
        if self.current is not None:
            if not blocking and self.current.config.memory == "device":  # peers would learn of the gathering too late
                self.current.refuse(f"{error}")
                raise error
            self.current.refuse(_MUST_AGREE)
        self._gather(HYBRID_DISPATCH, (REFUSED,), error)

    def _agree(self, on_device, room, shape):
        gathered = self._gather(HYBRID_DISPATCH, (room, *shape))
        for rank, (_, *theirs) in enumerate(gathered):
            for name, first, other in zip(SHAPE, gathered[0][1:], theirs):
                if other != first:
                    raise ferry.UsageError(f"dispatch: {name} is {first} on rank 0 and {other} on rank {rank}: pass the same on every rank")
        most = max(theirs for theirs, *_ in gathered)
        made = self._made.get(shape, [])
        if not made or made[0].config.max_tokens < most:
            made = self._made[shape] = [self._make_on(on_device, _settings(shape, -(-most // ROUNDING) * ROUNDING if made else most))]
        self.current, self._shape = made[0], shape
        self.last[shape[0] > 0] = self.current

    @contextlib.contextmanager
    def meeting(self, call):
        """A call that needs no agreement: where a peer's does, their calls differ, and every rank raises."""
        try:
            with in_words(WORDS):
                yield
        except ferry.UsageError as refusal:
            if _MUST_AGREE in str(refusal):
                self.meet(call)
            raise


def _settings(shape, most):
    alignment, hidden, experts, slots = shape
    settings = normal_settings(max(1, most), hidden, experts, slots)
    if alignment == 0:
        return settings
    return settings | {"layout": "expert_major", "alignment": alignment, "zero_padding": True}


@dataclasses.dataclass
class Dispatch:
    """A dispatch with new routes, read."""

    rows: Rows
    routes: Routes
    weights: Any  # float32 [T, K] or None
    alignment: int  # of the rows of each expert; 0: rows are not permuted
    blocking: bool
    limit: int | None  # num_permuted_tokens
    config: Any  # HybridEpConfigInstance

    @property
    def shape(self):
        return self.alignment, self.config.hidden_dim, self.routes.experts, self.routes.ids.shape[1]


_ELEMENTS = ("sparse_to_dense_map", "rdma_to_attn_map", "attn_to_rdma_map", "num_dispatched_tokens_tensor",
             "local_expert_routing_map", "num_of_tokens_per_rank", "config")
_PERMUTED_ELEMENTS = (*_ELEMENTS[:5], "dense_chunk_layout", "dense_to_expert_map", "tokens_per_expert", *_ELEMENTS[5:],
                      "overflow_flag")


class Handle(collections.abc.Sequence):
    """What a dispatch returns for later calls, with the elements of Hybrid-EP's tuples: 7, or permuted 11.

    They are computed on access. Those that only Hybrid-EP's kernels read raise UnsupportedError when they are used.
    """

    def __init__(self, owner: HybridExchanges, exchange, call: Dispatch, memory: Memory, plan):
        self.owner, self.exchange, self.plan, self.arrays = owner, exchange, plan, call.rows.arrays
        self.routes, self.config = call.routes, call.config
        self.permuted, self.limit = call.alignment > 0, call.limit
        self.rows, self.local_ids = memory.rows, memory.local_ids
        self._counts, self._offsets = memory.counts, memory.offsets
        self._names = _PERMUTED_ELEMENTS if self.permuted else _ELEMENTS

    def __len__(self):
        return len(self._names)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return tuple(self._element(name) for name in self._names[index])
        return self._element(self._names[index])

    def _element(self, name):
        if not hasattr(type(self), name) and name != "config" or self.permuted and name == "local_expert_routing_map":
            return Unreadable(ferry.UnsupportedError(f"handle: Ferry has no {name}, which only Hybrid-EP's kernels read"))
        return getattr(self, name)

    @property
    def num_of_tokens_per_rank(self):
        return self.plan.tokens

    @property
    def num_dispatched_tokens_tensor(self):
        """int32 [1]: tokens received. On the host if rows are not permuted."""
        if not self.permuted:
            return self.arrays.from_list([self.rows], "int32")
        return self.arrays.to(self.plan.tokens_between[:, self.exchange.rank].sum().reshape(1), "int32")

    @property
    def local_expert_routing_map(self):
        """bool [rows, L]: the experts of this rank that each received token goes to."""
        ids = self.local_ids[: self.rows]
        return self.arrays.scattered(ids, ids == ids, local_experts(self.exchange))

    @property
    def padded_tokens_per_expert(self):
        """int64 [L], where the rows lie: rows of each expert with its padding; dropped rows do not count."""
        ends = self._offsets if self.limit is None else self._offsets.clip(max=self.limit)
        return self.arrays.to(ends[1:] - ends[:-1], "int64")

    @property
    def tokens_per_expert(self):
        """int32 [L], where the rows lie: rows of each expert without padding; dropped rows do not count."""
        return self.arrays.module.minimum(self._counts, self.arrays.to(self.padded_tokens_per_expert, "int32"))

    @property
    def overflow_flag(self):
        """int32 [1], where the rows lie: 1 if rows were dropped."""
        total = self._offsets[-1:]
        dropped = total > (total if self.limit is None else self.limit)
        if self.routes.left_out is not None and len(self.routes.left_out):
            dropped = dropped | (self.routes.left_out >= 0).any()
        return self.arrays.to(dropped, "int32")


def local_experts(exchange):
    return len(exchange.config.placement.experts_of(exchange.rank))


class Memory:
    """Memory of its own for what a dispatch receives: `rows` rows, with room for at least one."""

    def __init__(self, exchange, sent: Rows, weighted: bool, rows: int):
        def empty(shape, name):
            return sent.arrays.empty(shape, name, sent.hidden)

        self.rows, self._sent = rows, sent
        self._room = room = max(1, rows)
        permuted = exchange.config.layout != "rank_major"
        by_slot = () if permuted else (exchange.config.top_k,)
        self.parts = tuple(empty((room, part.shape[1]), sent.arrays.type_name(part)) for part in sent.parts)
        self.weight = empty((room, *by_slot), "float32") if weighted else None
        self.local_ids = None if permuted else empty((room, *by_slot), "int32")
        groups = local_experts(exchange) if permuted else exchange.ranks
        self.plan = empty((exchange.plan_bytes,), "uint8")
        self.counts, self.offsets = empty((groups,), "int32"), empty((groups + 1,), "int32")

    def for_routes(self, may_drop: bool):
        return ferry.ReceiveBuffers(
            self.parts, weight=self.weight, local_ids=self.local_ids, plan=self.plan, counts=self.counts,
            row_offsets=self.offsets, rows=self._room, allow_truncation=may_drop)

    def for_plan(self):
        return ferry.ReceiveBuffers(self.parts)

    def results(self):
        """(hidden, weight, scaling_factor), each of `rows` rows."""
        scales, weight = self._sent.scales, self.weight
        factors = self._sent.arrays.contiguous(self.parts[1][: self.rows, :scales]) if scales else None
        return self.parts[0][: self.rows], None if weight is None else weight[: self.rows], factors


class Calls:
    """The calls of one HybridEPBuffer. `sms`: the most SMs of a dispatch and of a combine; 0: no limit."""

    def __init__(self, exchanges: HybridExchanges, sms: tuple[int, int]):
        self.exchanges = exchanges
        self._sms = sms

    def dispatch(self, call: Dispatch):
        """(hidden, weight, scaling_factor, tokens_per_expert, handle). Collective."""
        room = max(len(call.rows.hidden), call.config.max_num_of_tokens_per_rank)
        on_device = call.rows.arrays.on_device
        if not call.blocking:
            return self.exchanges.run(call.shape, room, on_device, lambda exchange: self._deliver(exchange, call, call.limit))
        exchange, (total, routes, _) = self.exchanges.run(
            call.shape, room, on_device, lambda exchange: (exchange, exchange.dispatch_counts(call.routes.ids)))
        rows = total if call.limit is None else call.limit
        hidden, weight, factors, _, handle = self._deliver(exchange, call, rows)
        return hidden, weight, factors, call.rows.arrays.from_list(rows_of_experts(routes, call.alignment, rows), "int64"), handle

    def _deliver(self, exchange, call, rows):
        def make():
            memory = Memory(exchange, call.rows, call.weights is not None, rows)
            return memory, memory.for_routes(call.limit is not None)

        memory, buffers = made_or_refused(exchange, "dispatch", make)
        with in_words(WORDS):
            plan = self._send(exchange, call.rows, call.routes.ids, call.weights, buffers).plan
        plan.set_row_bound(rows)
        handle = Handle(self.exchanges, exchange, call, memory, plan)
        return *memory.results(), handle.padded_tokens_per_expert if call.alignment else None, handle

    def dispatch_again(self, handle: Handle, rows: Rows, weights):
        """(hidden, weight, scaling_factor) of new tokens on the routes of a handle. Collective."""
        exchange = handle.exchange
        # A dispatch by a plan may write padding past the limit, and takes weights for the capacity only.
        by_plan = handle.limit is None and weights is None

        def make():
            memory = Memory(exchange, rows, weights is not None, handle.rows)
            return memory, memory.for_plan() if by_plan else memory.for_routes(handle.limit is not None)

        memory, buffers = made_or_refused(exchange, "dispatch", make)
        with self.exchanges.meeting("a dispatch with a handle"):
            self._send(exchange, rows, handle.plan if by_plan else handle.routes.ids, weights, buffers)
        return memory.results()

    def _send(self, exchange, rows, routes, weights, buffers):
        sms = self._sms[0] if rows.arrays.on_device else 0
        return exchange.dispatch(rows.tokens, routes, weights, format=rows.format, memory=buffers, sm_limit=sms)

    def combine(self, handle: Handle, hidden, values):
        """(bfloat16 [T, H], float32 [T, K] or None): the sums of the rows, and `values` of the rows by slot. Collective.

        `values`: float32 [rows], or [rows, K] if the handle's rows are not permuted.
        """
        exchange, arrays = handle.exchange, handle.arrays
        columns = exchange.config.hidden

        def make():
            result = arrays.empty((handle.plan.tokens, columns), "bfloat16", hidden)
            return result, with_dropped_rows(handle, hidden), with_dropped_rows(handle, values)

        result, rows, row_values = made_or_refused(exchange, "combine", make)
        given = {"row_values": row_values} if values is not None and handle.permuted else {}
        with self.exchanges.meeting("a combine"):
            sms = self._sms[1] if arrays.on_device else 0
            combined = exchange.combine(rows, handle.plan, result=result, sm_limit=sms, **given)
        if given:
            return combined
        return combined, None if values is None else self.exchanges.combined_weights(handle, values)


def with_dropped_rows(handle, array):
    """The array as long as the plan of the handle, which on the host counts rows that were dropped. They are not read."""
    if array is None or handle.limit is None or handle.arrays.on_device or len(array) >= handle.plan.total:
        return array
    longer = handle.arrays.full((handle.plan.total, *array.shape[1:]), 0, handle.arrays.type_name(array), array)
    longer[: len(array)] = array
    return longer


def rows_of_experts(routes, alignment, limit):
    """Rows of each expert, padding included, of which the first `limit` have memory."""
    ends = [0]
    for count in routes:
        ends.append(ends[-1] + -(-count // max(1, alignment)) * max(1, alignment))
    return [min(end, limit) - min(begin, limit) for begin, end in zip(ends, ends[1:])]
