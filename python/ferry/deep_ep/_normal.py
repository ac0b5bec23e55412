"""Normal mode: one row for each token and rank, by source rank and token, with local expert ids and weights."""

from __future__ import annotations

import struct
from typing import NamedTuple

import ferry
from ferry.deep_ep import _layout
from ferry.deep_ep._checks import refusing, require, require_shape
from ferry.deep_ep._layout import LazyTuple


class NormalHandle(LazyTuple):
    """(rank_prefix_matrix, channel_prefix_matrix, recv_channel_prefix_matrix, recv_src_idx, is_token_in_rank,
    send_head), each computed on first access. `rows`: received rows, or with num_worst_tokens their bound."""

    def __init__(self, arrays, exchange, routes, rows, plan, is_token_in_rank, tokens_of_ranks, channels):
        self.exchange, self.plan, self.rows = exchange, plan, rows
        self.tokens, self.hidden, self.slots = routes.tokens, routes.hidden, routes.slots
        self.worst = tokens_of_ranks is None

        def sources():
            tokens = arrays.on_host(plan.tokens_between)[:, exchange.rank].sum()
            return plan.sources[: min(int(tokens), rows)]

        def recv_channel_prefix_matrix():
            if self.worst:
                raise ferry.UnsupportedError(
                    "handle: after a dispatch with num_worst_tokens the host does not know the other ranks' tokens")
            return _layout.recv_channel_prefix_matrix(arrays, sources(), tokens_of_ranks, channels)

        super().__init__(
            lambda: _layout.rank_prefix_matrix(arrays, plan.tokens_between),
            lambda: _layout.channel_prefix_matrix(arrays, is_token_in_rank, channels),
            recv_channel_prefix_matrix,
            lambda: arrays.contiguous(sources()[:, 1]),
            lambda: is_token_in_rank,
            lambda: _layout.send_head(arrays, is_token_in_rank),
        )


class InputRows:
    """The rows that a dispatch sends: one bfloat16 array, or values and their scales as raw parts."""

    __slots__ = ("tokens", "like", "format", "types", "columns", "scale_columns")

    def __init__(self, tokens, like, format, types=(), columns=(), scale_columns=None):
        self.tokens, self.like, self.format = tokens, like, format
        self.types, self.columns, self.scale_columns = types, columns, scale_columns  # of raw parts

    def empty(self, arrays, rows):
        """Arrays to receive `rows` rows."""
        if self.scale_columns is None:
            return arrays.empty((rows, self.like.shape[1]), "bfloat16", self.like)
        return tuple(arrays.empty((rows, n), t, self.like) for n, t in zip(self.columns, self.types))

    def recv_x(self, arrays, parts, rows):
        """The first `rows` received rows, in the form that the interface returns."""
        if self.scale_columns is None:
            return parts if len(parts) == rows else parts[:rows]
        values, scales = parts
        return values[:rows], arrays.contiguous(scales[:rows, : self.scale_columns])


def read_input(arrays, x) -> InputRows:
    if not isinstance(x, (tuple, list)):
        require(arrays, x, "x", 2)
        if x.dtype not in arrays.dtypes(("bfloat16",)):
            raise ferry.UsageError(f"x: expected bfloat16, or (float8_e4m3fn, scales), got {arrays.type_name(x)}")
        rows = arrays.contiguous(x)
        return InputRows(rows, rows, "bf16")
    if len(x) != 2:
        raise ferry.UsageError(f"x: expected (float8_e4m3fn, scales), got {len(x)} arrays")
    values, scales = x
    require(arrays, values, "x[0]", 2)
    require(arrays, scales, "x[1]", 2)
    require_shape(scales, "x[1]", (len(values), scales.shape[1]))
    names = (arrays.type_name(values), arrays.type_name(scales))
    if names[0] != "float8_e4m3fn" or names[1] not in ("float32", "int32"):
        raise ferry.UsageError(f"x: expected (float8_e4m3fn, float32 or int32 scales), got {names}")
    rows, columns = scales.shape
    padded = -(-columns // 4) * 4  # a part is a multiple of 16 bytes
    if padded != columns:
        wide = arrays.full((rows, padded), 0, names[1], values)
        wide[:, :columns] = arrays.detached(scales)
        scales = wide
    parts = (arrays.contiguous(values), arrays.contiguous(scales))
    return InputRows(
        parts, parts[0], f"raw:{values.shape[1]}+{padded * 4}", names, (values.shape[1], padded), columns)


def gathered_expert_counts(rank, num_tokens_per_expert) -> list:
    """The same for a dispatch without ids: the sum of all ranks' num_tokens_per_expert. Collective."""
    mine = [int(count) for count in num_tokens_per_expert.tolist()]
    packed = rank.all_gather(struct.pack(f"{len(mine)}q", *mine))
    counts_of_ranks = [struct.unpack(f"{len(mine)}q", theirs) for theirs in packed]
    local = ferry.Placement.blocks(len(mine), rank.size).experts_of(rank.index)
    return [sum(counts[expert] for counts in counts_of_ranks) for expert in local]


class Routes(NamedTuple):
    """The checked arguments of a dispatch with new routes."""

    sent: InputRows
    ids: object
    weights: object  # None without topk_idx: then each rank is one expert
    experts: int
    settings: tuple  # hidden, experts as the caller counts them and top-k (0 without ids): all ranks have them in common

    @property
    def tokens(self):
        return len(self.sent.like)

    @property
    def hidden(self):
        return self.settings[0]

    @property
    def slots(self):
        return self.ids.shape[1]


def routes_of(arrays, ranks, x, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert) -> Routes:
    sent = read_input(arrays, x)
    tokens, hidden = sent.like.shape
    require(arrays, is_token_in_rank, "is_token_in_rank", 2, "bool")
    require_shape(is_token_in_rank, "is_token_in_rank", (tokens, ranks))
    require(arrays, num_tokens_per_expert, "num_tokens_per_expert", 1, "int32", "int64")
    experts = num_tokens_per_expert.shape[0]
    if topk_idx is None:
        ids = _layout.ids_from_ranks(arrays, is_token_in_rank)
        return Routes(sent, ids, None, ranks, (hidden, experts, 0))
    require(arrays, topk_idx, "topk_idx", 2, "int32", "int64")
    require(arrays, topk_weights, "topk_weights", 2, "float32")
    require_shape(topk_idx, "topk_idx", (tokens, topk_idx.shape[1]))
    require_shape(topk_weights, "topk_weights", topk_idx.shape)
    ids, weights = arrays.contiguous(topk_idx), arrays.contiguous(topk_weights)
    return Routes(sent, ids, weights, experts, (hidden, experts, ids.shape[1]))


def dispatch_with_routes(buffer, arrays, read, topk_idx, is_token_in_rank, num_tokens_per_expert, alignment, worst, num_sms):
    """(recv_x, recv_topk_idx, recv_topk_weights, counts of local experts, handle) for the Routes that `read` returns.

    The ranks first count their routes in a call of the exchange, so that every rank allocates the rows it receives. With
    num_worst_tokens the host waits for nothing.
    """
    exchanges = buffer.exchanges
    try:
        routes, error = read(), None
    except Exception as caught:
        routes, error = None, caught
    if is_count(worst):
        return dispatch_worst(exchanges, arrays, error, routes, topk_idx, is_token_in_rank, worst, num_sms)
    exchange, (total, counts, tokens_of_ranks) = exchanges.counted(arrays, error, routes)
    received = receive(exchange, arrays, routes, total, topk_idx, num_sms)
    handle = NormalHandle(
        arrays, exchange, routes, total, received.plan, is_token_in_rank, tokens_of_ranks, channels_of(num_sms))
    if topk_idx is None:
        counts = gathered_expert_counts(exchanges.rank, num_tokens_per_expert)
    return *received.arrays, _layout.rounded_up(counts, alignment), handle


def is_count(worst):
    return isinstance(worst, int) and worst > 0


def dispatch_worst(exchanges, arrays, error, routes, topk_idx, is_token_in_rank, worst, num_sms):
    """The same for num_worst_tokens: every array has that many rows, and the list of counts is empty."""
    exchange = exchanges.with_room(arrays, error, routes, -(-worst // exchanges.rank.size))
    received = receive(exchange, arrays, routes, worst, topk_idx, num_sms, fill=True)
    if not arrays.on_device and received.plan.total > worst:
        raise ferry.UsageError(f"dispatch: num_worst_tokens = {worst}, but {received.plan.total} rows were received")
    return *received.arrays, [], NormalHandle(
        arrays, exchange, routes, worst, received.plan, is_token_in_rank, None, channels_of(num_sms))


def channels_of(num_sms):
    return max(1, num_sms // 2)


class Received(NamedTuple):
    arrays: tuple  # recv_x, recv_topk_idx, recv_topk_weights
    plan: object


def receive(exchange, arrays, routes, rows, topk_idx, num_sms, fill=False) -> Received:
    """Dispatches into new arrays of `rows` rows. `fill`: ids of rows past the total are -1."""
    sent, slots, room = routes.sent, routes.slots, max(rows, 1)
    like = sent.like
    with refusing(exchange):
        parts = sent.empty(arrays, room)
        local_ids = arrays.full((room, slots), -1, "int32", like) if fill else arrays.empty((room, slots), "int32", like)
        weight = arrays.empty((room, slots), "float32", like) if topk_idx is not None else None
        storage = arrays.empty((exchange.plan_bytes,), "uint8", like)
    memory = ferry.ReceiveBuffers(parts, weight=weight, local_ids=local_ids, plan=storage, rows=room)
    plan = exchange.dispatch(
        sent.tokens, routes.ids, routes.weights, format=sent.format, memory=memory, sm_limit=sm_limit_of(arrays, num_sms)).plan
    plan.set_row_bound(min(rows, exchange.capacity))
    recv_x = sent.recv_x(arrays, parts, rows)
    if topk_idx is None:
        return Received((recv_x, None, None), plan)
    recv_idx = arrays.to(local_ids, arrays.type_name(topk_idx))
    if rows < room:
        recv_idx, weight = recv_idx[:rows], weight[:rows]
    return Received((recv_x, recv_idx, weight), plan)


def sm_limit_of(arrays, num_sms):
    return num_sms if arrays.on_device else 0


def require_handle(handle):
    if not isinstance(handle, NormalHandle):
        raise ferry.UsageError(f"handle: expected a handle of dispatch, got {type(handle).__name__}")
    return handle


def dispatch_by_handle(arrays, x, handle, check, num_sms):
    """recv_x by the routes of a handle."""
    exchange, rows = require_handle(handle).exchange, handle.rows
    with refusing(exchange):
        check()
        sent = read_input(arrays, x)
        parts = sent.empty(arrays, max(rows, 1))
    exchange.dispatch(
        sent.tokens, handle.plan, format=sent.format, memory=ferry.ReceiveBuffers(parts), sm_limit=sm_limit_of(arrays, num_sms))
    return sent.recv_x(arrays, parts, rows)


def combine(buffer, arrays, x, handle, topk_weights, bias, check, num_sms):
    """(combined_x, combined_topk_weights or None): sums over ranks in rank order, plus the biases."""
    exchange, plan = require_handle(handle).exchange, handle.plan
    shape = (handle.tokens, handle.hidden)
    biases = () if bias is None else [b for b in (bias if isinstance(bias, (tuple, list)) else (bias,)) if b is not None]
    with refusing(exchange):
        check()
        require(arrays, x, "x", 2, "bfloat16")
        if len(biases) > 2:
            raise ferry.UsageError(f"bias: expected at most two arrays, got {len(biases)}")
        for number, term in enumerate(biases):
            require(arrays, term, f"bias[{number}]", 2, "bfloat16")
            require_shape(term, f"bias[{number}]", shape)
        if topk_weights is not None:
            require(arrays, topk_weights, "topk_weights", 2, "float32")
            require_shape(topk_weights, "topk_weights", (len(topk_weights), handle.slots))
        result = arrays.empty(shape, "float32" if biases else "bfloat16", x)
    exchange.combine(arrays.detached(x), plan, result=result, sm_limit=sm_limit_of(arrays, num_sms))
    if biases:
        for term in biases:
            result = result + arrays.to(arrays.detached(term), "float32")
        result = arrays.to(result, "bfloat16")
    return result, combined_weights(buffer, arrays, handle, topk_weights)


def combined_weights(buffer, arrays, handle, topk_weights):
    if topk_weights is None:
        return None
    exchange = buffer.exchanges.for_weights(arrays, handle.exchange)
    columns, slots = exchange.config.hidden, topk_weights.shape[1]
    if columns != slots:
        wide = arrays.full((len(topk_weights), columns), 0, "float32", topk_weights)
        wide[:, :slots] = arrays.detached(topk_weights)
        topk_weights = wide
    result = arrays.empty((handle.tokens, columns), "float32", topk_weights)
    return exchange.combine(arrays.contiguous(topk_weights), handle.plan, result=result)[:, :slots]
