"""Low-latency mode: rows by local expert, [L, R*M, H], quantised on the way; sums weighted at home."""

from __future__ import annotations

import ferry
from ferry.deep_ep import _layout
from ferry.deep_ep._layout import LazyTuple


class LowLatencyHandle(LazyTuple):
    """(src_info, layout_range, M, H, E); the first two are made when they are looked at."""

    def __init__(self, arrays, exchange, pool):
        config = exchange.config
        self.arrays, self.exchange, self.pool = arrays, exchange, pool
        self.received = None
        self.combine_buffer = None
        mine = config.placement.experts_of(exchange.rank)

        def src_info():
            local = len(mine)
            return arrays.dense(self.rows().source[:, 1].reshape(local, -1) if local else self.rows().source[:, 1])

        def layout_range():
            counts = self.rows().plan.counts
            return _layout.layout_range(arrays, counts[:, mine[0] : mine[-1] + 1] if mine else counts[:, :0])

        super().__init__(
            src_info, layout_range, lambda: config.max_tokens, lambda: config.hidden, lambda: config.experts)

    def rows(self):
        if self.received is None:
            raise ferry.UsageError("low-latency handle: the rows have not been received: call the dispatch's hook first")
        return self.received


def format_of(use_fp8, round_scale, use_ue8m0):
    if use_ue8m0 and not round_scale:
        raise ferry.UsageError("use_ue8m0 needs round_scale: exponents alone hold powers of two")
    if not use_fp8:
        return "bf16"
    return "fp8-columns" + "-pow2" * round_scale + "-packed" * use_ue8m0


class Received:
    """Memory for one dispatch, in the shapes of the interface."""

    def __init__(self, arrays, exchange, form, like):
        config = exchange.config
        experts = len(config.placement.experts_of(exchange.rank))
        rows = experts * exchange.capacity
        shape = (experts, exchange.capacity, config.hidden)
        fp8 = form != "bf16"
        self.values = arrays.empty(shape, "float8_e4m3fn" if fp8 else "bfloat16", like)
        self.scales, parts = None, self.values
        if fp8:
            packed = form.endswith("packed")
            columns = -(-config.hidden // (512 if packed else 128))
            leading = -(-rows // 4) * 4
            flat = arrays.empty((columns, leading), "int32" if packed else "float32", like)
            self.scales = flat[:, :rows].T.reshape(experts, exchange.capacity, columns)
            parts = (self.values, flat)
        self.counts = arrays.empty((experts,), "int32", like)
        plan = arrays.empty((ferry.plan_bytes(config, exchange.ranks),), "uint8", like)
        self.memory = ferry.ArrivalsMemory(parts, plan=plan)

    def hand_out(self):
        return self.values if self.scales is None else (self.values, self.scales)


def dispatch(pool, arrays, x, topk_idx, form, stats, split):
    """(recv, recv_count, handle, hook or None)."""
    exchange = pool.take()
    received = Received(arrays, exchange, form, x)
    handle = LowLatencyHandle(arrays, exchange, pool)

    def finish(rows):
        received.counts[...] = rows.counts
        if stats is not None:
            stats[...] += received.counts
        handle.received = rows

    if not split:
        finish(exchange.dispatch(x, arrays.dense(topk_idx), format=form, memory=received.memory))
        return received.hand_out(), received.counts, handle, None

    exchange.dispatch_send(x, arrays.dense(topk_idx), format=form, memory=received.memory)
    pool.hold(exchange)

    def hook():
        finish(exchange.dispatch_receive())
        pool.release(exchange)

    return received.hand_out(), received.counts, handle, hook


def combine(handle, arrays, x, topk_weights, out, split):
    """(result, hook or None). Halves bring every row home, the fused call one sum for each token and rank."""
    plan = handle.rows().plan
    exchange = handle.pool.take()
    hidden = exchange.config.hidden
    result = out if out is not None else arrays.empty((plan.tokens, hidden), "bfloat16", x)
    weights = arrays.dense(topk_weights)
    if not split:
        exchange.combine(x, plan, home_weights=weights, reduction="partial", result=result)
        return result, None

    exchange.combine_send(x, plan, home_weights=weights, reduction="exact", result=result)
    handle.pool.hold(exchange)

    def hook():
        exchange.combine_receive()
        handle.pool.release(exchange)

    return result, hook


def next_combine_buffer(handle):
    if handle.combine_buffer is None:
        exchange = handle.exchange
        local = len(exchange.config.placement.experts_of(exchange.rank))
        shape = (local, exchange.capacity, exchange.config.hidden)
        handle.combine_buffer = handle.arrays.empty(shape, "bfloat16", handle.rows().counts)
    return handle.combine_buffer
