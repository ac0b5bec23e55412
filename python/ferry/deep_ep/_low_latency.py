"""Low-latency mode: rows by local expert, [L, R*M, H], quantised on the way; sums weighted at home."""

from __future__ import annotations

import ferry
from ferry.deep_ep import _layout
from ferry.deep_ep._layout import LazyTuple
from ferry.deep_ep._mistakes import refuse_combine, refuse_dispatch, require, require_shape, told_to_peers


class LowLatencyHandle(LazyTuple):
    """(src_info, layout_range, M, H, E); the first two are made when they are looked at."""

    def __init__(self, arrays, exchange, pool, like, topk_idx):
        config = exchange.config
        self.arrays, self.exchange, self.pool = arrays, exchange, pool
        self.like, self.topk_idx = like, topk_idx
        self.received = None
        self.combine_buffer = None
        mine = config.placement.experts_of(exchange.rank)

        def src_info():
            return arrays.dense(self.rows().source[:, 1].reshape(len(mine), exchange.capacity))

        def layout_range():
            counts = self.rows().plan.counts
            return _layout.layout_range(arrays, counts[:, mine[0] : mine[-1] + 1] if mine else counts[:, :0])

        super().__init__(
            src_info, layout_range, lambda: config.max_tokens, lambda: config.hidden, lambda: config.experts)

    def rows(self):
        if self.received is None:
            raise ferry.UsageError("low-latency handle: the rows have not been received: call the dispatch's hook first")
        return self.received


def own(handle):
    if not isinstance(handle, LowLatencyHandle):
        raise ferry.UsageError(f"handle: expected one of low_latency_dispatch, got {type(handle).__name__}")
    return handle


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
        self.memory = ferry.ReceiveBuffers(parts, plan=plan, counts=self.counts)

    def hand_out(self):
        return self.values if self.scales is None else (self.values, self.scales)


def hook_of(pool, exchange, receive):
    """What is called once for the second half of a call; then the exchange is free for others, whatever came of it."""
    waiting = [receive]

    def hook():
        if not waiting:  # another call may be under way on the exchange
            raise ferry.UsageError("hook: was called before: a call has one second half")
        try:
            waiting.pop()()
        finally:
            pool.release(exchange)

    pool.hold(exchange)
    return hook


def dispatch(pool, arrays, x, topk_idx, check_form, stats, split):
    """(recv, recv_count, handle, hook or None)."""
    exchange = pool.take()
    with told_to_peers(lambda: refuse_dispatch(exchange, arrays, x)):
        form = check_form()
        require(arrays, topk_idx, "topk_idx", 2)
        if stats is not None:
            require(arrays, stats, "cumulative_local_expert_recv_stats", 1, "int32")
            local = len(exchange.config.placement.experts_of(exchange.rank))
            require_shape(stats, "cumulative_local_expert_recv_stats", (local,))
        x, ids = arrays.dense(x), arrays.dense(topk_idx)
        received = Received(arrays, exchange, form, x)
        handle = LowLatencyHandle(arrays, exchange, pool, received.counts, topk_idx)

    def finish(rows):
        if stats is not None:
            stats[...] += received.counts
        handle.received = rows

    if not split:
        finish(exchange.dispatch(x, ids, format=form, memory=received.memory))
        return received.hand_out(), received.counts, handle, None

    def receive():
        try:
            finish(exchange.dispatch_receive())
        except (ferry.BadIdError, ferry.OverflowError):
            # All that could be carried has come, and the caller has it in hand.
            finish(exchange.last_dispatch_result())
            raise

    exchange.dispatch_send(x, ids, format=form, memory=received.memory)
    return received.hand_out(), received.counts, handle, hook_of(pool, exchange, receive)


def combine(handle, arrays, x, topk_idx, topk_weights, out, check, split):
    """(result, hook or None). Halves bring every row home, the fused call one sum for each token and rank."""
    exchange = handle.pool.take()
    with told_to_peers(lambda: refuse_combine(exchange, handle.received and handle.received.plan)):
        check()
        plan = handle.rows().plan
        require(arrays, x, "x", 3)
        require(arrays, topk_weights, "topk_weights", 2)
        result = out if out is not None else arrays.empty((plan.tokens, exchange.config.hidden), "bfloat16", x)
        x, weights = arrays.plain(x), arrays.dense(topk_weights)
        if topk_idx is not handle.topk_idx:
            require(arrays, topk_idx, "topk_idx", 2)
            require_shape(topk_idx, "topk_idx", weights.shape)
            weights = arrays.dense(arrays.where(topk_idx >= 0, weights, 0))
    if not split:
        exchange.combine(x, plan, topk_weights=weights, reduction="partial", result=result)
        return result, None

    exchange.combine_send(x, plan, topk_weights=weights, reduction="exact", result=result)
    return result, hook_of(handle.pool, exchange, exchange.combine_receive)


def next_combine_buffer(handle):
    if handle.combine_buffer is None:
        exchange = handle.exchange
        local = len(exchange.config.placement.experts_of(exchange.rank))
        shape = (local, exchange.capacity, exchange.config.hidden)
        handle.combine_buffer = handle.arrays.empty(shape, "bfloat16", handle.like)
    return handle.combine_buffer
