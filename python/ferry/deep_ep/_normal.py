"""Normal mode: one row for each token and rank, by source rank and token, with local expert ids and weights."""

from __future__ import annotations

import dataclasses
import struct
from typing import NamedTuple

import ferry
from ferry.deep_ep import _layout
from ferry.deep_ep._checks import refuse_combine, refuse_dispatch, refuse_on_error, require, require_shape
from ferry.deep_ep._layout import LazyTuple


class NormalHandle(LazyTuple):
    """(rank_prefix_matrix, channel_prefix_matrix, recv_channel_prefix_matrix, recv_src_idx, is_token_in_rank,
    send_head), each computed on first access."""

    def __init__(self, arrays, exchange, rows, is_token_in_rank, tokens_of_ranks, channels):
        plan = self.plan = rows.plan
        self.exchange = exchange
        self.row_bound = None  # num_worst_tokens; None: the host knows the number of rows
        source = rows.source

        def received():
            return source[: plan.total]

        super().__init__(
            lambda: _layout.rank_prefix_matrix(arrays, plan.tokens_between),
            lambda: _layout.channel_prefix_matrix(arrays, is_token_in_rank, channels),
            lambda: _layout.recv_channel_prefix_matrix(arrays, received(), tokens_of_ranks, channels),
            lambda: arrays.contiguous(received()[:, 1]),
            lambda: is_token_in_rank,
            lambda: _layout.send_head(arrays, is_token_in_rank),
        )


@dataclasses.dataclass
class InputRows:
    """The rows that a dispatch sends: one bfloat16 array, or values and their scales as raw parts."""

    tokens: object
    columns: tuple
    types: tuple
    scale_columns: int | None = None

    @property
    def like(self):
        return self.tokens if self.scale_columns is None else self.tokens[0]

    @property
    def format(self):
        if self.scale_columns is None:
            return "bf16"
        return f"raw:{self.columns[0]}+{self.columns[1] * 4}"

    def empty(self, arrays, rows):
        """Arrays to receive `rows` rows."""
        parts = [arrays.empty((rows, n), t, self.like) for n, t in zip(self.columns, self.types)]
        return tuple(parts) if self.scale_columns is not None else parts[0]

    def recv_x(self, arrays, parts, rows):
        """The first `rows` received rows, in the form that the interface returns."""
        if self.scale_columns is None:
            return parts[:rows]
        values, scales = parts
        return values[:rows], arrays.contiguous(scales[:rows, : self.scale_columns])


def read_input(arrays, x) -> InputRows:
    if not isinstance(x, (tuple, list)):
        require(arrays, x, "x", 2)
        if x.dtype not in arrays.dtypes(("bfloat16",)):
            raise ferry.UsageError(f"x: expected bfloat16, or (float8_e4m3fn, scales), got {arrays.type_name(x)}")
        return InputRows(arrays.contiguous(x), (x.shape[1],), ("bfloat16",))
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
    return InputRows((arrays.contiguous(values), arrays.contiguous(scales)), (values.shape[1], padded), names, columns)


class NormalBuffers:
    """Receive buffers for a dispatch with new routes: room for `worst` rows (num_worst_tokens), or for the capacity."""

    def __init__(self, arrays, exchange, sent, worst, slots, with_weights):
        rows = max(worst, exchange.capacity)
        like = sent.like
        self.parts = sent.empty(arrays, rows)
        self.weight = arrays.empty((rows, slots), "float32", like) if with_weights else None
        if worst > 0:  # rows past the total are returned too, with ids of -1
            self.local_ids = arrays.full((rows, slots), -1, "int32", like)
        else:
            self.local_ids = arrays.empty((rows, slots), "int32", like)
        self.plan = arrays.empty((ferry.plan_bytes(exchange.config, exchange.ranks),), "uint8", like)

    def receive_buffers(self):
        return ferry.ReceiveBuffers(self.parts, weight=self.weight, local_ids=self.local_ids, plan=self.plan)


def local_expert_counts(arrays, exchange, plan) -> list:
    """Routes to each expert of this rank. Waits for the device."""
    mine = exchange.config.placement.experts_of(exchange.rank)
    return arrays.on_host(plan.counts)[:, mine[0] : mine[-1] + 1].sum(0).tolist() if mine else []


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
    shape: tuple  # tokens; then hidden, experts and top-k (0 without ids), which all ranks must have in common


def routes_of(arrays, ranks, x, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert) -> Routes:
    sent = read_input(arrays, x)
    tokens, hidden = len(sent.like), sent.like.shape[1]
    require(arrays, is_token_in_rank, "is_token_in_rank", 2, "bool")
    require_shape(is_token_in_rank, "is_token_in_rank", (tokens, ranks))
    require(arrays, num_tokens_per_expert, "num_tokens_per_expert", 1, "int32", "int64")
    experts = num_tokens_per_expert.shape[0]
    if topk_idx is None:
        ids = _layout.ids_from_ranks(arrays, is_token_in_rank)
        return Routes(sent, ids, None, ranks, (tokens, hidden, experts, 0))
    # The core checks their types and lengths, and reports errors to the peers.
    require(arrays, topk_idx, "topk_idx", 2)
    require(arrays, topk_weights, "topk_weights", 2)
    ids, weights = arrays.contiguous(topk_idx), arrays.contiguous(topk_weights)
    return Routes(sent, ids, weights, experts, (tokens, hidden, experts, ids.shape[1]))


def dispatch_with_routes(buffer, arrays, read, topk_idx, is_token_in_rank, num_tokens_per_expert, alignment, worst, config):
    """(recv_x, recv_topk_idx, recv_topk_weights, counts of local experts, handle) for the Routes that `read` returns."""
    with_ids = topk_idx is not None
    routes, tokens_of_ranks = buffer.exchanges.agree(read)
    sent, slots = routes.sent, routes.ids.shape[1]
    exchange = buffer.exchanges.normal(arrays, tokens_of_ranks, routes.shape[1], routes.experts, slots)
    with refuse_on_error(lambda: refuse_dispatch(exchange, arrays, sent.like)):
        buffers = NormalBuffers(arrays, exchange, sent, worst, slots, with_ids)
    rows = exchange.dispatch(
        sent.tokens, routes.ids, routes.weights, format=sent.format, memory=buffers.receive_buffers(),
        sm_limit=sm_limit_of(arrays, config))
    handle = NormalHandle(arrays, exchange, rows, is_token_in_rank, tokens_of_ranks, max(1, config.num_sms // 2))
    counts = []
    if worst > 0:
        require_bound(arrays, rows.plan, worst)
        count = handle.row_bound = worst
        rows.plan.set_row_bound(min(worst, exchange.capacity))
    else:
        count = rows.wait_total()
    # Enqueue these before the counts are read, because that waits for the stream.
    recv_x = sent.recv_x(arrays, buffers.parts, count)
    recv_idx = arrays.to(buffers.local_ids[:count], arrays.type_name(topk_idx)) if with_ids else None
    if worst <= 0:
        if with_ids:
            counts = local_expert_counts(arrays, exchange, rows.plan)
        else:
            counts = gathered_expert_counts(buffer.exchanges.rank, num_tokens_per_expert)
        counts = _layout.rounded_up(counts, alignment)
    return recv_x, recv_idx, buffers.weight[:count] if with_ids else None, counts, handle


def require_bound(arrays, plan, worst):
    """Raises UsageError if more rows were received, where the host knows their number without asking a GPU."""
    if not arrays.on_device and plan.total > worst:
        raise ferry.UsageError(f"dispatch: num_worst_tokens = {worst}, but {plan.total} rows were received")


def sm_limit_of(arrays, config):
    return config.num_sms if arrays.on_device else 0


def require_handle(handle):
    if not isinstance(handle, NormalHandle):
        raise ferry.UsageError(f"handle: expected a handle of dispatch, got {type(handle).__name__}")
    return handle


def dispatch_by_handle(arrays, read, like, handle, config):
    """recv_x for the InputRows that `read` returns, by the routes of a handle."""
    plan = require_handle(handle).plan
    with refuse_on_error(lambda: refuse_dispatch(handle.exchange, arrays, like)):
        sent = read()
        count = plan.total if handle.row_bound is None else handle.row_bound
        parts = sent.empty(arrays, max(count, 1))
    handle.exchange.dispatch(
        sent.tokens, plan, format=sent.format, memory=ferry.ReceiveBuffers(parts), sm_limit=sm_limit_of(arrays, config))
    return sent.recv_x(arrays, parts, count)


def combine(buffer, arrays, x, handle, topk_weights, bias, check, config):
    """(combined_x, combined_topk_weights or None): sums over ranks in rank order, plus the biases."""
    exchange, plan = require_handle(handle).exchange, handle.plan
    biases = [b for b in (bias if isinstance(bias, (tuple, list)) else (bias,)) if b is not None]
    with refuse_on_error(lambda: refuse_combine(exchange, plan)):
        check()
        shape = (plan.tokens, exchange.config.hidden)
        require(arrays, x, "x", 2, "bfloat16")
        if len(biases) > 2:
            raise ferry.UsageError(f"bias: expected at most two arrays, got {len(biases)}")
        for number, term in enumerate(biases):
            require(arrays, term, f"bias[{number}]", 2, "bfloat16")
            require_shape(term, f"bias[{number}]", shape)
        if topk_weights is not None:
            require(arrays, topk_weights, "topk_weights", 2, "float32")
            require_shape(topk_weights, "topk_weights", (len(topk_weights), exchange.config.top_k))
        result = arrays.empty(shape, "float32" if biases else "bfloat16", x)
    exchange.combine(arrays.detached(x), plan, result=result, sm_limit=sm_limit_of(arrays, config))
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
    result = arrays.empty((handle.plan.tokens, columns), "float32", topk_weights)
    return exchange.combine(arrays.contiguous(topk_weights), handle.plan, result=result)[:, :slots]
