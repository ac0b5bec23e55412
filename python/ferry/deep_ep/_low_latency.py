"""Low-latency mode: rows by local expert, [L, R*M, H], quantised by dispatch; combine weights them on the source rank."""

from __future__ import annotations

import ferry
from ferry.deep_ep import _layout
from ferry.deep_ep._checks import refuse_combine, refuse_dispatch, refuse_on_error, require, require_shape
from ferry.deep_ep._layout import LazyTuple


class LowLatencyHandle(LazyTuple):
    """(src_info, layout_range, M, H, E); the first two are computed on first access."""

    def __init__(self, arrays, exchange, pool, like, topk_idx):
        config = exchange.config
        self.arrays, self.exchange, self.pool = arrays, exchange, pool
        self.like, self.topk_idx = like, topk_idx
        self.received = None
        self.combine_buffer = None
        mine = config.placement.experts_of(exchange.rank)

        def src_info():
            return arrays.contiguous(self.rows().source[:, 1].reshape(len(mine), exchange.capacity))

        def layout_range():
            counts = self.rows().plan.counts
            return _layout.layout_range(arrays, counts[:, mine[0] : mine[-1] + 1] if mine else counts[:, :0])

        super().__init__(
            src_info, layout_range, lambda: config.max_tokens, lambda: config.hidden, lambda: config.experts)

    def rows(self):
        if self.received is None:
            raise ferry.UsageError("low-latency handle: the rows have not been received: call the dispatch's hook first")
        return self.received


def require_handle(handle):
    if not isinstance(handle, LowLatencyHandle):
        raise ferry.UsageError(f"handle: expected a handle of low_latency_dispatch, got {type(handle).__name__}")
    return handle


def read_format(use_fp8, round_scale, use_ue8m0):
    if use_ue8m0 and not round_scale:
        raise ferry.UsageError("use_ue8m0 needs round_scale: an exponent can only represent a power of two")
    if not use_fp8:
        return "bf16"
    return "fp8-columns" + "-pow2" * round_scale + "-packed" * use_ue8m0


class LowLatencyBuffers:
    """Receive buffers for one dispatch, in the shapes of the interface."""

    def __init__(self, arrays, exchange, format, like):
        config = exchange.config
        experts = len(config.placement.experts_of(exchange.rank))
        rows = experts * exchange.capacity
        shape = (experts, exchange.capacity, config.hidden)
        fp8 = format != "bf16"
        self.values = arrays.empty(shape, "float8_e4m3fn" if fp8 else "bfloat16", like)
        self.scales, parts = None, self.values
        if fp8:
            packed = format.endswith("packed")
            columns = -(-config.hidden // (512 if packed else 128))
            leading = -(-rows // 4) * 4
            flat = arrays.empty((columns, leading), "int32" if packed else "float32", like)
            self.scales = flat[:, :rows].T.reshape(experts, exchange.capacity, columns)
            parts = (self.values, flat)
        self.counts = arrays.empty((experts,), "int32", like)
        plan = arrays.empty((ferry.plan_bytes(config, exchange.ranks),), "uint8", like)
        self.memory = ferry.ReceiveBuffers(parts, plan=plan, counts=self.counts)

    def recv_x(self):
        return self.values if self.scales is None else (self.values, self.scales)


def make_hook(pool, exchange, receive):
    """The hook that runs a call's receive phase, once. The exchange then serves other calls, even if the phase failed."""
    pending = [receive]

    def hook():
        if not pending:  # another call may be using the exchange by now
            raise ferry.UsageError("hook: was called before; it receives a call's rows once")
        try:
            pending.pop()()
        finally:
            pool.release(exchange)

    pool.mark_busy(exchange)
    return hook


def dispatch(pool, arrays, x, topk_idx, read_format, stats, split):
    """(recv, recv_count, handle, hook or None)."""
    exchange = pool.acquire()
    with refuse_on_error(lambda: refuse_dispatch(exchange, arrays, x)):
        format = read_format()
        require(arrays, topk_idx, "topk_idx", 2)
        if stats is not None:
            require(arrays, stats, "cumulative_local_expert_recv_stats", 1, "int32")
            local = len(exchange.config.placement.experts_of(exchange.rank))
            require_shape(stats, "cumulative_local_expert_recv_stats", (local,))
        x, ids = arrays.contiguous(x), arrays.contiguous(topk_idx)
        buffers = LowLatencyBuffers(arrays, exchange, format, x)
        handle = LowLatencyHandle(arrays, exchange, pool, buffers.counts, topk_idx)

    def finish(rows):
        if stats is not None:
            stats[...] += buffers.counts
        handle.received = rows

    if not split:
        finish(exchange.dispatch(x, ids, format=format, memory=buffers.memory))
        return buffers.recv_x(), buffers.counts, handle, None

    def receive():
        try:
            finish(exchange.dispatch_receive())
        except (ferry.BadIdError, ferry.OverflowError):
            # The rows that could be sent were received, in arrays that the caller already has.
            finish(exchange.last_dispatch_result())
            raise

    exchange.dispatch_send(x, ids, format=format, memory=buffers.memory)
    return buffers.recv_x(), buffers.counts, handle, make_hook(pool, exchange, receive)


def combine(handle, arrays, x, topk_idx, topk_weights, out, check, split):
    """(result, hook or None). In phases combine returns every row; fused it returns one sum for each token and rank."""
    exchange = handle.pool.acquire()
    with refuse_on_error(lambda: refuse_combine(exchange, handle.received and handle.received.plan)):
        check()
        plan = handle.rows().plan
        require(arrays, x, "x", 3)
        require(arrays, topk_weights, "topk_weights", 2)
        result = out if out is not None else arrays.empty((plan.tokens, exchange.config.hidden), "bfloat16", x)
        x, weights = arrays.detached(x), arrays.contiguous(topk_weights)
        if topk_idx is not handle.topk_idx:
            require(arrays, topk_idx, "topk_idx", 2)
            require_shape(topk_idx, "topk_idx", weights.shape)
            weights = arrays.contiguous(arrays.where(topk_idx >= 0, weights, 0))
    if not split:
        exchange.combine(x, plan, topk_weights=weights, reduction="partial", result=result)
        return result, None

    exchange.combine_send(x, plan, topk_weights=weights, reduction="exact", result=result)
    return result, make_hook(handle.pool, exchange, exchange.combine_receive)


def next_combine_buffer(handle):
    if handle.combine_buffer is None:
        exchange = handle.exchange
        local = len(exchange.config.placement.experts_of(exchange.rank))
        shape = (local, exchange.capacity, exchange.config.hidden)
        handle.combine_buffer = handle.arrays.empty(shape, "bfloat16", handle.like)
    return handle.combine_buffer
