"""The registered operators: kernels, fake kernels, gradients."""

from __future__ import annotations

import torch
from torch import library

import ferry
from ferry import _core
from ferry.torch._registry import exchange_of

_library = library.Library("ferry", "DEF")
# `call_token` is not read. Compilers merge two calls with equal arguments into one, unless this argument differs.
# `done` is an input of the backward call. Without it, a compiler that recomputes the forward call would do so only on ranks
# with tokens, because a result without elements needs no recomputation.
_library.define(
    "dispatch(Tensor x, Tensor ids, Tensor? weights, int exchange, int lane, Tensor? call_token=None) -> "
    "(Tensor data, Tensor weight, Tensor counts, Tensor row_offsets, Tensor plan)")
_library.define("dispatch_backward(Tensor d_data, Tensor? d_weight, Tensor plan, SymInt tokens, int exchange, int lane, "
                "Tensor? call_token=None) -> (Tensor d_x, Tensor d_weights)")
_library.define("combine(Tensor outputs, Tensor? row_weights, Tensor plan, SymInt tokens, int exchange, int lane, "
                "Tensor? call_token=None) -> (Tensor result, Tensor done)")
_library.define("combine_backward(Tensor d_result, Tensor outputs, Tensor? row_weights, Tensor plan, int exchange, int lane, "
                "Tensor? call_token=None) -> (Tensor d_outputs, Tensor d_row_weights)")
_library.define("group_expert(Tensor counts, int exchange, int lane) -> Tensor")


def _may_call_kernel(gradient):
    """Whether a backward may call its kernel directly. While gradients are recorded it may not: the registered operator
    then refuses gradients of gradients."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or type(gradient) is not torch.Tensor:
        return False
    return (gradient.is_cuda or gradient.is_cpu) and _core._is_unobserved()


def _rows_shape(exchange):
    config = exchange.config
    if config.layout == "expert_padded":
        return (_groups(exchange), exchange.capacity, config.hidden)
    return (exchange.capacity, config.hidden)


def _row_count(exchange):
    shape = _rows_shape(exchange)
    return shape[0] * shape[1] if len(shape) == 3 else shape[0]


def _groups(exchange):
    config = exchange.config
    if config.layout == "rank_major":
        return exchange.ranks
    return config.shared_experts + (config.local_slots or len(config.placement.experts_of(exchange.rank)))


def _plan_memory(exchange, like):
    return like.new_empty((ferry.plan_bytes(exchange.config, exchange.ranks),), dtype=torch.uint8)


def dispatch(x, ids, weights, exchange, lane, call_token=None):
    return _core._operator_dispatch(exchange_of(exchange), x, ids, weights, lane)


def _fake_dispatch(x, ids, weights, exchange, lane, call_token=None):
    exchange = exchange_of(exchange)
    rows, groups = _row_count(exchange), _groups(exchange)

    def ints(count):
        return x.new_empty((count,), dtype=torch.int32)

    return (x.new_empty(_rows_shape(exchange)), x.new_empty((rows,), dtype=torch.float32), ints(groups),
            ints(groups + 1), _plan_memory(exchange, x))


def _dispatch_backward(d_data, d_weight, plan, tokens, exchange, lane, call_token=None):
    exchange = exchange_of(exchange)
    if d_weight is None:
        return _core._operator_combine(exchange, d_data, None, plan, tokens, lane, None), d_data.new_empty((0,), dtype=torch.float32)
    return _core._operator_combine(exchange, d_data, None, plan, tokens, lane, d_weight)


def _fake_dispatch_backward(d_data, d_weight, plan, tokens, exchange, lane, call_token=None):
    config = exchange_of(exchange).config
    weights = (0,) if d_weight is None else (tokens, config.top_k)
    return d_data.new_empty((tokens, config.hidden)), d_data.new_empty(weights, dtype=torch.float32)


def combine(outputs, row_weights, plan, tokens, exchange, lane, call_token=None):
    return _core._operator_combine(exchange_of(exchange), outputs, row_weights, plan, tokens, lane, None)


def _combine_and_done(outputs, *others):
    return combine(outputs, *others), outputs.new_zeros((1,), dtype=torch.uint8)


def _fake_combine(outputs, row_weights, plan, tokens, exchange, lane, call_token=None):
    return (outputs.new_empty((tokens, exchange_of(exchange).config.hidden)),
            outputs.new_empty((1,), dtype=torch.uint8))


def _resized(rows, count):
    """`rows` cut or extended by zero rows to `count` rows. A plan may have more rows than the caller's tensor."""
    missing = count - rows.shape[0]
    if missing == 0:
        return rows
    return rows[:count] if missing < 0 else torch.cat((rows, rows.new_zeros((missing, *rows.shape[1:]))))


def _combine_backward(d_result, outputs, row_weights, plan, exchange, lane, call_token=None):
    hidden = outputs.shape[-1]
    count = outputs.numel() // hidden
    dot_rows = None if row_weights is None else outputs
    data, dots = _core._operator_combine_backward(exchange_of(exchange), d_result, dot_rows, plan, count, lane)
    d_rows = _resized(data.reshape(-1, hidden), count)
    if row_weights is None:
        return d_rows.reshape(outputs.shape).to(outputs.dtype), d_rows.new_empty((0,), dtype=torch.float32)
    scale = _resized(row_weights, count)[:, None]
    if d_rows.dtype == outputs.dtype:  # multiplies in fp32 and rounds once, without a copy in fp32
        d_rows.mul_(scale)
    else:
        d_rows = (d_rows.float() * scale).to(outputs.dtype)
    return d_rows.reshape(outputs.shape), _resized(dots, len(row_weights))


def _fake_combine_backward(d_result, outputs, row_weights, plan, exchange, lane, call_token=None):
    shape = (0,) if row_weights is None else (row_weights.shape[0],)
    return outputs.new_empty(outputs.shape), outputs.new_empty(shape, dtype=torch.float32)


for _name, _kernel, _fake in (
    ("dispatch", dispatch, _fake_dispatch),
    ("dispatch_backward", _dispatch_backward, _fake_dispatch_backward),
    ("combine", _combine_and_done, _fake_combine),
    ("combine_backward", _combine_backward, _fake_combine_backward),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _key)
    library.register_fake(f"ferry::{_name}", _fake, lib=_library)
    # Without this, compilers drop calls whose results are unused or empty, perhaps on this rank only: its peers would wait.
    torch.fx.node.has_side_effect(getattr(torch.ops.ferry, _name).default)


def _group_expert(counts, exchange, lane):
    return _core._group_expert(exchange_of(exchange), lane).clone()  # compilers may reuse the memory of what an operator returns


for _key in ("CPU", "CUDA"):
    _library.impl("group_expert", _group_expert, _key)
library.register_fake("ferry::group_expert", lambda counts, *_: torch.empty_like(counts), lib=_library)


def _setup_dispatch(ctx, inputs, output):
    x, _, weights, ctx.exchange, ctx.lane, call_token = inputs
    ctx.tokens, ctx.weighted = x.shape[0], weights is not None
    ctx.save_for_backward(output[4], call_token)
    ctx.mark_non_differentiable(*output[2:])


def _backward_of_dispatch(ctx, d_data, d_weight, *_):
    plan, call_token = ctx.saved_tensors
    operator = _dispatch_backward if _may_call_kernel(d_data) else torch.ops.ferry.dispatch_backward.default
    d_x, d_weights = operator(
        d_data, d_weight if ctx.weighted else None, plan, ctx.tokens, ctx.exchange, ctx.lane, call_token)
    return d_x, None, d_weights if ctx.weighted else None, None, None, None


def _setup_combine(ctx, inputs, output):
    outputs, row_weights, plan, _, ctx.exchange, ctx.lane, _ = inputs
    done = None
    if isinstance(output, tuple):
        _, done = output
        ctx.mark_non_differentiable(done)
    ctx.save_for_backward(outputs, row_weights, plan, done)


def _backward_of_combine(ctx, d_result, *_):
    outputs, row_weights, plan, done = ctx.saved_tensors
    operator = _combine_backward if _may_call_kernel(d_result) else torch.ops.ferry.combine_backward.default
    d_outputs, d_row_weights = operator(d_result, outputs, row_weights, plan, ctx.exchange, ctx.lane, done)
    return d_outputs, None if row_weights is None else d_row_weights, None, None, None, None, None


library.register_autograd(
    "ferry::dispatch", _backward_of_dispatch, setup_context=_setup_dispatch, lib=_library)
library.register_autograd("ferry::combine", _backward_of_combine, setup_context=_setup_combine, lib=_library)


def _refuse_second_gradients(ctx, *_):
    raise ferry.UsageError("ferry.torch: its operators do not support gradients of gradients")


for _name in ("dispatch_backward", "combine_backward"):
    library.register_autograd(f"ferry::{_name}", _refuse_second_gradients, lib=_library)


def _autograd_function(kernel, setup, gradients):
    """An autograd.Function over a kernel: fewer layers of Python than a registered operator."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = kernel(*inputs)
            setup(ctx, inputs, output)
            return output

        backward = staticmethod(gradients)

    return Function


DispatchFunction = _autograd_function(dispatch, _setup_dispatch, _backward_of_dispatch)
CombineFunction = _autograd_function(combine, _setup_combine, _backward_of_combine)
