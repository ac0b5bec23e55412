"""Normal mode: rows of one token each, by source rank and token, with their local expert ids and weights."""

from __future__ import annotations

import dataclasses
import struct
from typing import NamedTuple

import ferry
from ferry.deep_ep import _layout
from ferry.deep_ep._layout import LazyTuple
from ferry.deep_ep._mistakes import refuse_combine, refuse_dispatch, require, require_shape, told_to_peers


class NormalHandle(LazyTuple):
    """(rank_prefix_matrix, channel_prefix_matrix, recv_channel_prefix_matrix, recv_src_idx, is_token_in_rank,
    send_head), made when they are looked at."""

    def __init__(self, arrays, exchange, rows, is_token_in_rank, tokens_of_ranks, channels):
        plan = self.plan = rows.plan
        self.exchange = exchange
        self.rows = None  # as the caller has bounded them, where the host does not know how many came
        source = rows.source

        def received():
            return source[: plan.total]

        super().__init__(
            lambda: _layout.rank_prefix_matrix(arrays, plan.tokens_between),
            lambda: _layout.channel_prefix_matrix(arrays, is_token_in_rank, channels),
            lambda: _layout.recv_channel_prefix_matrix(arrays, received(), tokens_of_ranks, channels),
            lambda: arrays.dense(received()[:, 1]),
            lambda: is_token_in_rank,
            lambda: _layout.send_head(arrays, is_token_in_rank),
        )


@dataclasses.dataclass
class Carried:
    """What a dispatch carries: one array, or values and their scales as raw parts."""

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
        made = [arrays.empty((rows, n), t, self.like) for n, t in zip(self.columns, self.types)]
        return tuple(made) if self.scale_columns is not None else made[0]

    def hand_out(self, arrays, received, rows):
        if self.scale_columns is None:
            return received[:rows]
        values, scales = received
        return values[:rows], arrays.dense(scales[:rows, : self.scale_columns])


def carried(arrays, x) -> Carried:
    if not isinstance(x, (tuple, list)):
        require(arrays, x, "x", 2)
        if x.dtype not in arrays.dtypes(("bfloat16",)):
            raise ferry.UsageError(f"x: expected bfloat16, or (float8_e4m3fn, scales), got {arrays.type_name(x)}")
        return Carried(arrays.dense(x), (x.shape[1],), ("bfloat16",))
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
        wide[:, :columns] = arrays.plain(scales)
        scales = wide
    return Carried((arrays.dense(values), arrays.dense(scales)), (values.shape[1], padded), names, columns)


class Memory:
    """For a dispatch of new routes, with room for `worst` rows or all there may be."""

    def __init__(self, arrays, exchange, what, worst, slots, with_weights):
        wanted = max(worst, exchange.capacity)
        like = what.like
        self.parts = what.empty(arrays, wanted)
        self.weight = arrays.empty((wanted, slots), "float32", like) if with_weights else None
        if worst > 0:  # rows past the last are handed out as well: their ids are -1
            self.local_ids = arrays.full((wanted, slots), -1, "int32", like)
        else:
            self.local_ids = arrays.empty((wanted, slots), "int32", like)
        self.plan = arrays.empty((ferry.plan_bytes(exchange.config, exchange.ranks),), "uint8", like)

    def given(self):
        return ferry.ReceiveBuffers(self.parts, weight=self.weight, local_ids=self.local_ids, plan=self.plan)


def pairs_of_local_experts(arrays, exchange, plan) -> list:
    """(token, expert) pairs that came for each expert of this rank. Waits for the device."""
    mine = exchange.config.placement.experts_of(exchange.rank)
    return arrays.on_host(plan.counts)[:, mine[0] : mine[-1] + 1].sum(0).tolist() if mine else []


def pairs_as_told(rank, num_tokens_per_expert) -> list:
    """The same where no ids are given: what all ranks have counted. Collective."""
    mine = [int(count) for count in num_tokens_per_expert.tolist()]
    said = [struct.unpack(f"{len(mine)}q", theirs) for theirs in rank.all_gather(struct.pack(f"{len(mine)}q", *mine))]
    local = ferry.Placement.blocks(len(mine), rank.size).experts_of(rank.index)
    return [sum(counts[expert] for counts in said) for expert in local]


class Routes(NamedTuple):
    """A dispatch of new routes, looked at: what it carries, and where to."""

    what: Carried
    ids: object
    weights: object  # None where no ids were given: then the ranks are the experts
    experts: int
    shape: tuple  # tokens, and what all ranks must have alike: hidden, experts, top-k (0 without ids)


def routes_of(arrays, ranks, x, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert) -> Routes:
    what = carried(arrays, x)
    tokens, hidden = len(what.like), what.like.shape[1]
    require(arrays, is_token_in_rank, "is_token_in_rank", 2, "bool")
    require_shape(is_token_in_rank, "is_token_in_rank", (tokens, ranks))
    require(arrays, num_tokens_per_expert, "num_tokens_per_expert", 1, "int32", "int64")
    experts = num_tokens_per_expert.shape[0]
    if topk_idx is None:
        ids = _layout.ids_of_ranks(arrays, is_token_in_rank)
        return Routes(what, ids, None, ranks, (tokens, hidden, experts, 0))
    # Their types and lengths are the core's to check, which tells the peers.
    require(arrays, topk_idx, "topk_idx", 2)
    require(arrays, topk_weights, "topk_weights", 2)
    ids, weights = arrays.dense(topk_idx), arrays.dense(topk_weights)
    return Routes(what, ids, weights, experts, (tokens, hidden, experts, ids.shape[1]))


def dispatch_new(buffer, arrays, read, topk_idx, is_token_in_rank, num_tokens_per_expert, alignment, worst, config):
    """Routes that `read` returns: (recv_x, recv_topk_idx, recv_topk_weights, counts of local experts, handle)."""
    given = topk_idx is not None
    routes, tokens_of_ranks = buffer.exchanges.agree(read)
    what, slots = routes.what, routes.ids.shape[1]
    exchange = buffer.exchanges.normal(arrays, tokens_of_ranks, routes.shape[1], routes.experts, slots)
    with told_to_peers(lambda: refuse_dispatch(exchange, arrays, what.like)):
        memory = Memory(arrays, exchange, what, worst, slots, given)
    rows = exchange.dispatch(
        what.tokens, routes.ids, routes.weights, format=what.format, memory=memory.given(),
        sm_limit=sm_limit_of(arrays, config))
    handle = NormalHandle(arrays, exchange, rows, is_token_in_rank, tokens_of_ranks, max(1, config.num_sms // 2))
    counts = []
    if worst > 0:
        require_room(arrays, rows.plan, worst)
        count = handle.rows = worst
        rows.plan.vouch(min(worst, exchange.capacity))
    else:
        count = rows.wait_total()
    # Put on the stream before the counts are read, which waits for it.
    recv_x = what.hand_out(arrays, memory.parts, count)
    recv_idx = arrays.to(memory.local_ids[:count], arrays.type_name(topk_idx)) if given else None
    if worst <= 0:
        if given:
            counts = pairs_of_local_experts(arrays, exchange, rows.plan)
        else:
            counts = pairs_as_told(buffer.exchanges.rank, num_tokens_per_expert)
        counts = _layout.rounded_up(counts, alignment)
    return recv_x, recv_idx, memory.weight[:count] if given else None, counts, handle


def require_room(arrays, plan, worst):
    """Raises UsageError where the host knows that more rows came. Of a device it does not ask."""
    if not arrays.on_device and plan.total > worst:
        raise ferry.UsageError(f"dispatch: num_worst_tokens = {worst}, but {plan.total} rows have come")


def sm_limit_of(arrays, config):
    return config.num_sms if arrays.on_device else 0


def own(handle):
    if not isinstance(handle, NormalHandle):
        raise ferry.UsageError(f"handle: expected one of dispatch, got {type(handle).__name__}")
    return handle


def dispatch_again(arrays, read, like, handle, config):
    """What `read` returns, by the routes of a handle: recv_x."""
    plan = own(handle).plan
    with told_to_peers(lambda: refuse_dispatch(handle.exchange, arrays, like)):
        what = read()
        rows = handle.rows if handle.rows is not None else plan.total
        parts = what.empty(arrays, max(rows, 1))
    handle.exchange.dispatch(
        what.tokens, plan, format=what.format, memory=ferry.ReceiveBuffers(parts), sm_limit=sm_limit_of(arrays, config))
    return what.hand_out(arrays, parts, rows)


def combine(buffer, arrays, x, handle, topk_weights, bias, check, config):
    """(combined_x, combined_topk_weights or None): sums over ranks in their order, and the biases."""
    exchange, plan = own(handle).exchange, handle.plan
    biases = [b for b in (bias if isinstance(bias, (tuple, list)) else (bias,)) if b is not None]
    with told_to_peers(lambda: refuse_combine(exchange, plan)):
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
    exchange.combine(arrays.plain(x), plan, result=result, sm_limit=sm_limit_of(arrays, config))
    for term in biases:
        result = result + arrays.to(arrays.plain(term), "float32")
    result = arrays.to(result, "bfloat16")
    return result, combined_weights(buffer, arrays, handle, topk_weights)


def combined_weights(buffer, arrays, handle, topk_weights):
    if topk_weights is None:
        return None
    exchange = buffer.exchanges.of_weights(arrays, handle.exchange)
    columns, slots = exchange.config.hidden, topk_weights.shape[1]
    if columns != slots:
        wide = arrays.full((len(topk_weights), columns), 0, "float32", topk_weights)
        wide[:, :slots] = arrays.plain(topk_weights)
        topk_weights = wide
    result = arrays.empty((handle.plan.tokens, columns), "float32", topk_weights)
    return exchange.combine(arrays.dense(topk_weights), handle.plan, result=result)[:, :slots]
