"""Normal mode: rows of one token each, by source rank and token, with their local expert ids and weights."""

from __future__ import annotations

import dataclasses
import struct

import ferry
from ferry.deep_ep import _layout
from ferry.deep_ep._layout import LazyTuple


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
    """What a dispatch carries: one array, or values and their scales as opaque parts."""

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
        return f"opaque:{self.columns[0]}+{self.columns[1] * 4}"

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
        if arrays.type_name(x) != "bfloat16":
            raise ferry.UsageError(f"x: expected bfloat16, or (float8_e4m3fn, scales), got {arrays.type_name(x)}")
        return Carried(arrays.dense(x), (x.shape[1],), ("bfloat16",))
    values, scales = x
    names = (arrays.type_name(values), arrays.type_name(scales))
    if names[0] != "float8_e4m3fn" or names[1] not in ("float32", "int32"):
        raise ferry.UsageError(f"x: expected (float8_e4m3fn, float32 or int32 scales), got {names}")
    rows, columns = scales.shape
    padded = -(-columns // 4) * 4  # a part is a multiple of 16 bytes
    if padded != columns:
        wide = arrays.full((rows, padded), 0, names[1], values)
        wide[:, :columns] = scales
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
        return ferry.ArrivalsMemory(self.parts, weight=self.weight, local_ids=self.local_ids, plan=self.plan)


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


def dispatch_new(
    buffer, arrays, what, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert, alignment, worst, sm_limit
):
    """Routes by ids: (recv_x, recv_topk_idx, recv_topk_weights, counts of local experts, handle)."""
    given = topk_idx is not None
    experts = num_tokens_per_expert.shape[0] if given else buffer.group_size
    ids = arrays.dense(topk_idx) if given else _layout.ids_of_ranks(arrays, is_token_in_rank)
    slots = ids.shape[1]
    exchange, tokens_of_ranks = buffer.exchanges.normal(arrays, len(what.like), what.like.shape[1], experts, slots)
    memory = Memory(arrays, exchange, what, worst, slots, given)
    rows = exchange.dispatch(what.tokens, ids, topk_weights, format=what.format, memory=memory.given(), sm_limit=sm_limit)
    handle = NormalHandle(arrays, exchange, rows, is_token_in_rank, tokens_of_ranks, buffer.channels)
    counts = []
    if worst > 0:
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


def dispatch_again(arrays, what, handle, sm_limit):
    """The routes of a handle: recv_x."""
    plan = handle.plan
    rows = handle.rows if handle.rows is not None else plan.total
    parts = what.empty(arrays, max(rows, 1))
    handle.exchange.dispatch(what.tokens, plan, format=what.format, memory=ferry.ArrivalsMemory(parts), sm_limit=sm_limit)
    return what.hand_out(arrays, parts, rows)


def combine(buffer, arrays, x, handle, topk_weights, bias, sm_limit):
    """(combined_x, combined_topk_weights or None): sums over ranks in their order, and the biases."""
    if arrays.type_name(x) != "bfloat16":
        raise ferry.UsageError(f"combine: expected x of bfloat16, got {arrays.type_name(x)}")
    exchange, plan = handle.exchange, handle.plan
    biases = [b for b in (bias if isinstance(bias, (tuple, list)) else (bias,)) if b is not None]
    shape = (plan.tokens, exchange.config.hidden)
    result = arrays.empty(shape, "float32" if biases else "bfloat16", x)
    exchange.combine(x, plan, result=result, sm_limit=sm_limit)
    for term in biases:
        result = result + arrays.to(term, "float32")
    result = arrays.to(result, "bfloat16")
    return result, combined_weights(buffer, arrays, handle, topk_weights)


def combined_weights(buffer, arrays, handle, topk_weights):
    if topk_weights is None:
        return None
    exchange = buffer.exchanges.of_weights(arrays, handle.exchange)
    columns, slots = exchange.config.hidden, topk_weights.shape[1]
    if columns != slots:
        wide = arrays.full((len(topk_weights), columns), 0, "float32", topk_weights)
        wide[:, :slots] = topk_weights
        topk_weights = wide
    result = arrays.empty((handle.plan.tokens, columns), "float32", topk_weights)
    return exchange.combine(arrays.dense(topk_weights), handle.plan, result=result)[:, :slots]
