"""dispatch and combine of ElasticBuffer: how their arguments are read, and the calls of an exchange that they make."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ferry
from ferry._call_shapes import in_words
from ferry._core import _CallScope
from ferry.deep_ep import _normal
from ferry.deep_ep._arguments import integer, read_array
from ferry.deep_ep._arrays import arrays_of
from ferry.deep_ep._elastic_exchanges import ElasticExchanges, Shape
from ferry.deep_ep._elastic_handle import EPHandle
from ferry.deep_ep._exchanges import ELASTIC_COMBINE, ELASTIC_DISPATCH, METHODS, made_or_refused
from ferry.deep_ep._rows import Received, Rows
from ferry.deep_ep.utils import EventHandle, EventOverlap

MOST_SLOTS = 32
Delivered = tuple[Any, Any, Any, EPHandle, EventOverlap]  # what a dispatch returns
# What Ferry says of arguments that differ between ranks, and what this interface calls them.
WORDS = ((": format is ", ": x is "), ("raw on rank", "a tuple of values and scales on rank"),
         ("row_values and route_values", "topk_weights"), (": weights", ": topk_weights"))


@dataclass
class Settings:
    """Arguments that dispatch and combine have in common, as given."""

    num_sms: Any
    previous_event: Any
    previous_event_before_epilogue: Any
    async_with_compute_stream: Any

    def scope(self, streams: Any, x: Any) -> Any:
        """The stream of the call, as a context. `x`: tokens as given."""
        like = x[0] if isinstance(x, (tuple, list)) and x else x
        return _CallScope(streams, like, overlap_of(self.previous_event, "previous_event"), bool(self.async_with_compute_stream))

    def wait_for_epilogue(self) -> None:
        """Ferry's calls have no epilogue of their own: they wait before they begin."""
        late = overlap_of(self.previous_event_before_epilogue, "previous_event_before_epilogue")
        if late is not None and late.event is not None:
            late.current_stream_wait()


@dataclass
class Dispatch:
    """The other arguments of a dispatch, as given."""

    x: Any
    topk_idx: Any
    topk_weights: Any
    stats: Any
    num_experts: Any
    num_max_tokens_per_rank: Any
    expert_alignment: Any
    handle: Any
    do_handle_copy: Any
    do_cpu_sync: Any
    do_expand: Any
    do_zero_padding: Any
    column_major: Any


def overlap_of(event: Any, name: str) -> EventOverlap | None:
    if event is None or isinstance(event, EventOverlap):
        return event
    if isinstance(event, EventHandle):
        return EventOverlap(event)
    raise ferry.UsageError(f"{name}: expected an EventHandle or an EventOverlap, got {type(event).__name__}")


def rows_of(x: Any) -> Rows:
    """The Rows of bfloat16 [N, H], or of (float8_e4m3fn [N, H], scales [N, n])."""
    several = isinstance(x, (tuple, list))
    if several and len(x) != 2:
        raise ferry.UsageError(f"x: expected (float8_e4m3fn, scales), got {len(x)} arrays")
    values = x[0] if several else x
    arrays = arrays_of(values)
    name, kind, unit = ("x[0]", "float8_e4m3fn", 16) if several else ("x", "bfloat16", 8)
    values = read_array(name, values, arrays, (kind,), (None, None))
    tokens, hidden = values.shape
    if hidden == 0 or hidden % unit != 0:
        raise ferry.UsageError(f"{name}: expected a multiple of {unit} columns, because rows of {kind} are multiples of 16 bytes, "
                               f"got {hidden}")
    if not several:
        return Rows(arrays, values)
    scales = read_array("x[1]", x[1], arrays, ("float32", "int32"), (tokens, None))
    most = hidden // 16 * 4
    if not 0 < scales.shape[1] <= most:
        raise ferry.UsageError(f"x[1]: expected 1 to {most} scales for {hidden} values, got {scales.shape[1]}")
    return Rows(arrays, values, scales)


class Routes:
    """The arguments of a dispatch with new routes, read. `shape` stays None until it is read."""

    def __init__(self, ranks: int, default_tokens: int):
        self.ranks, self.default_tokens = ranks, default_tokens
        self.shape: Shape | None = None
        self.num_sms = 0

    def read(self, given: Dispatch) -> Shape:
        if given.topk_idx is None:
            raise ferry.UsageError("dispatch: topk_idx is needed without a handle")
        self.rows = rows = rows_of(given.x)
        arrays, ids = rows.arrays, read_array("topk_idx", given.topk_idx, rows.arrays, ("int64", "int32"), (rows.tokens, None))
        if not 1 <= ids.shape[1] <= MOST_SLOTS:
            raise ferry.UsageError(f"topk_idx: expected 1 to {MOST_SLOTS} columns, got {ids.shape[1]}")
        experts = integer("num_experts", given.num_experts, 1)
        self.expert_alignment = 1 if given.expert_alignment is None else integer("expert_alignment", given.expert_alignment, 1)
        expand = bool(given.do_expand)
        self.shape = Shape(expand, self.expert_alignment if expand else 1, rows.hidden, experts, ids.shape[1])
        most = self.default_tokens if given.num_max_tokens_per_rank is None else given.num_max_tokens_per_rank
        self.max_tokens = integer("num_max_tokens_per_rank", most, 1)
        if rows.tokens > self.max_tokens:
            raise ferry.UsageError(f"x: has {rows.tokens} tokens, more than num_max_tokens_per_rank = {self.max_tokens}")
        if given.do_zero_padding and not expand:
            raise ferry.UsageError("do_zero_padding: needs do_expand, because only that layout has padding")
        self.cpu_sync = given.do_cpu_sync is None or bool(given.do_cpu_sync)
        self.ids = ids
        self.topk_idx = arrays.copy(arrays.detached(given.topk_idx)) if given.do_handle_copy else given.topk_idx
        self.weights = None if given.topk_weights is None else read_array(
            "topk_weights", given.topk_weights, arrays, ("float32",), tuple(ids.shape))
        return self.shape

    def read_stats(self, stats: Any, local_experts: int) -> None:
        if stats is not None:
            read_array("cumulative_local_expert_recv_stats", stats, self.rows.arrays, ("int32",), (local_experts,))

    def count_most(self, top_k: int, local_experts: int) -> None:
        """Sets most_expanded: the rows of the expanded layout that there may be, as callers size them."""
        routes = self.ranks * self.max_tokens * min(top_k, local_experts)
        most = routes + (self.expert_alignment - 1) * local_experts
        self.most_expanded = -(-most // self.expert_alignment) * self.expert_alignment


class ElasticCalls:
    def __init__(self, streams: Any, exchanges: ElasticExchanges):
        self._streams, self._exchanges = streams, exchanges

    def dispatch(self, given: Dispatch, settings: Settings, theoretical_sms: Callable[[int, int], int]) -> Delivered:
        """`theoretical_sms`: of (num_experts, num_topk), for num_sms=0."""
        routes = Routes(self._exchanges.rank.size, self._exchanges.max_tokens)
        with contextlib.ExitStack() as stack:
            try:
                scope = stack.enter_context(settings.scope(self._streams, given.x))
                settings.wait_for_epilogue()
                shape = routes.read(given)
                least, more = divmod(shape.num_experts, routes.ranks)
                local_experts = least + (self._exchanges.rank.index < more)  # as Placement.blocks() places them
                routes.read_stats(given.stats, local_experts)
                routes.count_most(shape.top_k, local_experts)
                routes.num_sms = integer("num_sms", settings.num_sms) or theoretical_sms(shape.num_experts, shape.top_k)
            except BaseException as error:
                self._exchanges.refuse_dispatch(routes.shape, error)
            exchange = self._exchanges.for_dispatch(routes.rows.arrays.on_device, shape, routes.max_tokens)
            return self._deliver(given, routes, exchange, scope)

    def _deliver(self, given: Dispatch, routes: Routes, exchange: ferry.Exchange, scope: Any) -> Delivered:
        rows, expand = routes.rows, exchange.config.layout == "expert_major"
        lists, most = None, routes.most_expanded if expand else routes.ranks * routes.max_tokens
        if routes.cpu_sync:
            with self._exchanges.call(exchange, ELASTIC_DISPATCH):
                most, counts, _ = exchange.dispatch_counts(routes.ids)
            lists = [-(-count // routes.expert_alignment) * routes.expert_alignment for count in counts]
        arrays, weights = rows.arrays, routes.weights

        def make() -> tuple[Any, Received]:
            sent = weights
            if sent is None and not expand:
                sent = arrays.full(tuple(routes.ids.shape), 0, "float32", routes.ids)
            return sent, Received(exchange, rows, most, sent is not None)

        sent, received = made_or_refused(exchange, "dispatch", make)
        with self._exchanges.call(exchange, ELASTIC_DISPATCH), in_words(WORDS), _overflows_named(routes.max_tokens):
            plan = exchange.dispatch(rows.sent(), routes.ids, sent, format=rows.format, memory=received.memory(),
                                     sm_limit=routes.num_sms if arrays.on_device else 0).plan
        plan.set_row_bound(min(most, exchange.capacity))
        outputs = [*received.arrays(), *([routes.topk_idx] if given.do_handle_copy else ())]
        handle = EPHandle(self._exchanges, exchange, routes, plan, received, lists)
        recv_ids = None if expand else _ids_of(handle, arrays)
        if given.stats is not None:
            counts, stats = handle.num_unaligned_recv_tokens_per_expert, given.stats
            outputs.append(counts)
            stats += counts
        if given.do_zero_padding:
            _clear(received.parts, handle, arrays)
        recv_x = rows.received(received.parts, most, given.column_major)
        recv_weights = None if weights is None else received.weights[:most]
        overlap = scope.finish(_given(*_parts(given.x), given.topk_idx, given.topk_weights, given.stats),
                               [*outputs, *_given(recv_ids), *(recv_x if rows.scales else ())])
        handle.event = overlap.event
        return recv_x, recv_ids, recv_weights, handle, overlap

    def dispatch_again(self, given: Dispatch, settings: Settings, theoretical_sms: Callable[[int, int], int]) -> Delivered:
        """A dispatch by a handle."""
        handle = self._handle(given.handle, ELASTIC_DISPATCH)
        exchange, expand = handle.exchange, handle.do_expand

        def read(stack: contextlib.ExitStack) -> tuple[Any, ...]:
            _require_fit(given, handle)
            scope = stack.enter_context(settings.scope(self._streams, given.x))
            settings.wait_for_epilogue()
            num_sms = integer("num_sms", settings.num_sms) or theoretical_sms(handle.num_experts, handle.topk_idx.shape[1])
            rows, hidden = rows_of(given.x), exchange.config.hidden
            if (rows.tokens, rows.hidden) != (handle.plan.tokens, hidden):
                raise ferry.UsageError(f"x: expected shape [{handle.plan.tokens}, {hidden}] as in the dispatch that returned the "
                                       f"handle, got [{rows.tokens}, {rows.hidden}]")
            weights, room = None, None
            if given.topk_weights is not None:
                slots, like = tuple(handle.topk_idx.shape), rows.parts[0]
                weights = read_array("topk_weights", given.topk_weights, rows.arrays, ("float32",), slots)
                # A dispatch by a plan takes memory for weights of the whole capacity.
                room = rows.arrays.empty((exchange.capacity,) if expand else (exchange.capacity, slots[1]), "float32", like)
            return scope, num_sms, rows, rows.room(max(1, handle.rows)), weights, room

        with contextlib.ExitStack() as stack:
            scope, num_sms, rows, parts, weights, room = made_or_refused(exchange, "dispatch", lambda: read(stack))
            arrays = rows.arrays
            with self._exchanges.call(exchange, ELASTIC_DISPATCH), in_words(WORDS):
                exchange.dispatch(rows.sent(), handle.plan, weights, format=rows.format, sm_limit=num_sms if arrays.on_device else 0,
                                  memory=ferry.ReceiveBuffers(parts, weight=room))
            if given.do_zero_padding:
                _clear(parts, handle, arrays)
            recv_x = rows.received(parts, handle.rows, given.column_major)
            ids = None if expand else _ids_of(handle, arrays)
            recv_weights = None if weights is None else room[: handle.rows]
            overlap = scope.finish(_given(*_parts(given.x), given.topk_weights, handle.memory, handle.local_ids),
                                   [*parts, *_given(room, ids), *(recv_x if rows.scales else ())])
        return recv_x, ids, recv_weights, handle, overlap

    def combine(self, x: Any, given_handle: Any, topk_weights: Any, bias: Any, settings: Settings) -> tuple[Any, Any, EventOverlap]:
        handle = self._handle(given_handle, ELASTIC_COMBINE)
        exchange, expand = handle.exchange, handle.do_expand

        def read(stack: contextlib.ExitStack) -> tuple[Any, ...]:
            scope = stack.enter_context(settings.scope(self._streams, x))
            settings.wait_for_epilogue()
            num_sms = integer("num_sms", settings.num_sms) or handle.num_sms
            arrays, hidden = arrays_of(handle.topk_idx), exchange.config.hidden
            rows = read_array("x", x, arrays, ("bfloat16",), (None, hidden))
            if len(rows) > handle.rows:
                raise ferry.UsageError(f"x: expected at most the {handle.rows} rows that the dispatch of the handle returned, "
                                       f"got {len(rows)}")
            weights = None if topk_weights is None else read_array(
                "topk_weights", topk_weights, arrays, ("float32",), (len(rows),) if expand else (len(rows), handle.topk_idx.shape[1]))
            shape = (handle.plan.tokens, hidden)
            biases = [read_array("bias", term, arrays, ("bfloat16",), shape) for term in _biases(bias)]
            result = arrays.empty(shape, "float32" if biases else "bfloat16", rows)
            return scope, num_sms if arrays.on_device else 0, rows, weights, biases, result

        with contextlib.ExitStack() as stack:
            scope, sm_limit, rows, weights, biases, result = made_or_refused(exchange, "combine", lambda: read(stack))
            values = weights if expand else None
            summed = None
            try:
                with self._exchanges.call(exchange, ELASTIC_COMBINE), in_words((*WORDS, ("outputs: ", "x: "))):
                    made = exchange.combine(rows, handle.plan, row_values=values, result=result, sm_limit=sm_limit)
            except ferry.BadSourceError:
                if weights is not None and not expand:
                    self._exchanges.combined_weights(handle, weights)  # the peers' calls go on
                raise
            if values is not None:
                summed = made[1]
            elif weights is not None:
                summed = self._exchanges.combined_weights(handle, weights)
            outputs = [result, *_given(summed)]
            if biases:
                result = _normal.with_biases(result, biases)
                outputs.append(result)
            return result, summed, scope.finish(_given(x, topk_weights, *_parts(bias), handle.memory), outputs)

    def _handle(self, handle: Any, call: int) -> EPHandle:
        if not isinstance(handle, EPHandle):
            wrong = f"handle: expected an EPHandle that dispatch returned, got {type(handle).__name__}"
        elif handle.exchanges is not self._exchanges:
            wrong = "handle: of another ElasticBuffer: pass one that a dispatch of this ElasticBuffer returned"
        else:
            return handle
        return self._exchanges.refuse(call, ferry.UsageError(wrong), operation=METHODS[call])


def _given(*arrays: Any) -> list[Any]:
    return [array for array in arrays if array is not None]


def _parts(arrays: Any) -> Any:
    return arrays if isinstance(arrays, (tuple, list)) else (arrays,)


def _biases(bias: Any) -> list[Any]:
    terms = _given(*_parts(bias))
    if len(terms) > 2:
        raise ferry.UsageError(f"bias: expected at most two arrays, got {len(terms)}")
    return terms


def _ids_of(handle: EPHandle, arrays: Any) -> Any:
    """recv_topk_idx, an array of the caller's own, which it may change."""
    ids, kind = handle.local_ids[: handle.rows], arrays.type_name(handle.topk_idx)
    return arrays.copy(ids) if kind == "int32" else arrays.to(ids, kind)


def _clear(parts: tuple[Any, ...], handle: EPHandle, arrays: Any) -> None:
    """Sets the padding between experts to zero."""
    if handle.expert_alignment > 1:
        padding = handle.padding()
        for part in parts:
            arrays.clear(part[: handle.rows], padding)


def _require_fit(given: Dispatch, handle: EPHandle) -> None:
    """Raises UsageError if arguments beside a handle do not fit it."""
    if given.topk_idx is not None:
        raise ferry.UsageError("dispatch: a handle excludes topk_idx: the routes are the handle's")
    if given.do_cpu_sync:
        raise ferry.UsageError("dispatch: a handle excludes do_cpu_sync: the host knows what the handle says")
    if bool(given.do_expand) != handle.do_expand:
        raise ferry.UsageError(f"do_expand = {bool(given.do_expand)}, but the handle is of a dispatch with do_expand={handle.do_expand}")
    if given.do_zero_padding and not handle.do_expand:
        raise ferry.UsageError("do_zero_padding: needs do_expand, because only that layout has padding")
    for name in ("num_experts", "expert_alignment", "num_max_tokens_per_rank"):
        value = getattr(given, name)
        if value is not None and value != getattr(handle, name):
            raise ferry.UsageError(f"{name} = {value!r}, but the handle is of a dispatch with {getattr(handle, name)}")


@contextlib.contextmanager
def _overflows_named(max_tokens: int) -> Iterator[None]:
    try:
        yield
    except ferry.OverflowError as error:
        record = error.record
        raise ferry.OverflowError(
            f"dispatch: rank {record.rank} is sent {record.needed} rows, but num_max_tokens_per_rank = {max_tokens} has room for "
            f"{record.capacity}: a token lists an expert more than once, or ranks differ in num_max_tokens_per_rank",
            record) from error
