"""The operators: kernels, fake kernels, gradients."""

from __future__ import annotations

import torch
from torch import library

import ferry
from ferry import _core
from ferry.torch._registry import exchange_of

_library = library.Library("ferry", "DEF")
# `call`: nothing is read from it. Compilers take two calls with equal arguments for one and the same, unless it differs.
# `done`: the backward call takes it. Without, compilers that recompute would do so only where there are tokens: a result
# of no elements needs none.
_library.define(
    "dispatch(Tensor x, Tensor ids, Tensor? weights, int exchange, int lane, Tensor? call=None) -> "
    "(Tensor data, Tensor weight, Tensor counts, Tensor row_offsets, Tensor plan)")
_library.define("dispatch_backward(Tensor d_data, Tensor? d_weight, Tensor plan, SymInt tokens, int exchange, int lane, "
                "Tensor? call=None) -> (Tensor d_x, Tensor d_weights)")
_library.define("combine(Tensor outputs, Tensor? weights, Tensor plan, SymInt tokens, int exchange, int lane, "
                "Tensor? call=None) -> (Tensor result, Tensor done)")
_library.define("combine_backward(Tensor d_result, Tensor outputs, Tensor? weights, Tensor plan, int exchange, int lane, "
                "Tensor? call=None) -> (Tensor d_outputs, Tensor d_weight)")


def nobody_watches():
    """Whether nothing stands between an operator and its kernel, so that the kernel itself may be called.

    The way there leads through several layers in Python, which take longer than the rest of a call from it.
    """
    c = torch._C
    if c._len_torch_dispatch_stack() or c._len_torch_function_stack() or c._functorch.maybe_current_level() is not None:
        return False
    return not (c._get_tracing_state() or torch.autograd._profiler_enabled())


def _is_direct(gradient):
    """Whether a backward may call its kernel: with gradients recorded, somebody may ask for those of the gradients."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or type(gradient) is not torch.Tensor:
        return False
    return (gradient.is_cuda or gradient.is_cpu) and nobody_watches()


def _rows_shape(exchange):
    config = exchange.config
    if config.layout == "expert_padded":
        return (len(config.placement.experts_of(exchange.rank)), exchange.capacity, config.hidden)
    return (exchange.capacity, config.hidden)


def _rows(exchange):
    shape = _rows_shape(exchange)
    return shape[0] * shape[1] if len(shape) == 3 else shape[0]


def _groups(exchange):
    config = exchange.config
    return exchange.ranks if config.layout == "rank_major" else len(config.placement.experts_of(exchange.rank))


def _plan_memory(exchange, like):
    return like.new_empty((ferry.plan_bytes(exchange.config, exchange.ranks),), dtype=torch.uint8)


def dispatch(x, ids, weights, exchange, lane, call=None):
    return _core._dispatch_rows(exchange_of(exchange), x, ids, weights, lane)


def _fake_dispatch(x, ids, weights, exchange, lane, call=None):
    exchange = exchange_of(exchange)
    rows, groups = _rows(exchange), _groups(exchange)

    def ints(count):
        return x.new_empty((count,), dtype=torch.int32)

    return (x.new_empty(_rows_shape(exchange)), x.new_empty((rows,), dtype=torch.float32), ints(groups),
            ints(groups + 1), _plan_memory(exchange, x))


def _dispatch_backward(d_data, d_weight, plan, tokens, exchange, lane, call=None):
    exchange, d_data = exchange_of(exchange), d_data.contiguous()
    if d_weight is None:
        return _core._combine_rows(exchange, d_data, None, plan, tokens, lane), d_data.new_empty((0,), dtype=torch.float32)
    return _core._combine_rows(exchange, d_data, None, plan, tokens, lane, d_weight.contiguous())


def _fake_dispatch_backward(d_data, d_weight, plan, tokens, exchange, lane, call=None):
    config = exchange_of(exchange).config
    weights = (0,) if d_weight is None else (tokens, config.top_k)
    return d_data.new_empty((tokens, config.hidden)), d_data.new_empty(weights, dtype=torch.float32)


def _dense(given):  # what is no tensor is left for the module to refuse
    return given.contiguous() if isinstance(given, torch.Tensor) else given


def combine(outputs, weights, plan, tokens, exchange, lane, call=None):
    return _core._combine_rows(exchange_of(exchange), _dense(outputs), _dense(weights), plan, tokens, lane)


def _combine_and_done(outputs, *others):
    return combine(outputs, *others), outputs.new_zeros((1,), dtype=torch.uint8)


def _fake_combine(outputs, weights, plan, tokens, exchange, lane, call=None):
    return (outputs.new_empty((tokens, exchange_of(exchange).config.hidden)),
            outputs.new_empty((1,), dtype=torch.uint8))


def _as_long_as(rows, count):
    """Of `count` rows: past those of a plan there may be more, which are zero."""
    missing = count - rows.shape[0]
    if missing == 0:
        return rows
    return rows[:count] if missing < 0 else torch.cat((rows, rows.new_zeros((missing, *rows.shape[1:]))))


def _combine_backward(d_result, outputs, weights, plan, exchange, lane, call=None):
    hidden = outputs.shape[-1]
    count = outputs.numel() // hidden
    multiplied = None if weights is None else outputs.contiguous()
    data, dots = _core._gradient_rows(exchange_of(exchange), d_result.contiguous(), multiplied, plan, count, lane)
    d_rows = _as_long_as(data.reshape(-1, hidden), count)
    if weights is None:
        return d_rows.reshape(outputs.shape).to(outputs.dtype), d_rows.new_empty((0,), dtype=torch.float32)
    scale = _as_long_as(weights, count)[:, None]
    if d_rows.dtype == outputs.dtype:  # in fp32, rounded once, without a copy in fp32
        d_rows.mul_(scale)
    else:
        d_rows = (d_rows.float() * scale).to(outputs.dtype)
    return d_rows.reshape(outputs.shape), _as_long_as(dots, len(weights))


def _fake_combine_backward(d_result, outputs, weights, plan, exchange, lane, call=None):
    shape = (0,) if weights is None else (weights.shape[0],)
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
    # Compilers leave out what nobody uses or has no elements, on this rank alone perhaps: its peers would wait.
    torch.fx.node.has_side_effect(getattr(torch.ops.ferry, _name).default)


def _keep_of_dispatch(ctx, inputs, output):
    x, _, weights, ctx.exchange, ctx.lane, call = inputs
    ctx.tokens, ctx.weighted = x.shape[0], weights is not None
    ctx.save_for_backward(output[4], call)
    ctx.mark_non_differentiable(*output[2:])


def _gradients_of_dispatch(ctx, d_data, d_weight, *_):
    plan, call = ctx.saved_tensors
    operator = _dispatch_backward if _is_direct(d_data) else torch.ops.ferry.dispatch_backward.default
    d_x, d_weights = operator(
        d_data, d_weight if ctx.weighted else None, plan, ctx.tokens, ctx.exchange, ctx.lane, call)
    return d_x, None, d_weights if ctx.weighted else None, None, None, None


def _keep_of_combine(ctx, inputs, output):
    outputs, weights, plan, _, ctx.exchange, ctx.lane, _ = inputs
    done = None
    if isinstance(output, tuple):
        _, done = output
        ctx.mark_non_differentiable(done)
    ctx.save_for_backward(outputs, weights, plan, done)


def _gradients_of_combine(ctx, d_result, *_):
    outputs, weights, plan, done = ctx.saved_tensors
    operator = _combine_backward if _is_direct(d_result) else torch.ops.ferry.combine_backward.default
    d_outputs, d_weight = operator(d_result, outputs, weights, plan, ctx.exchange, ctx.lane, done)
    return d_outputs, None if weights is None else d_weight, None, None, None, None, None


library.register_autograd(
    "ferry::dispatch", _gradients_of_dispatch, setup_context=_keep_of_dispatch, lib=_library)
library.register_autograd("ferry::combine", _gradients_of_combine, setup_context=_keep_of_combine, lib=_library)


def _refuse_second_gradients(ctx, *_):
    raise ferry.UsageError("ferry.torch: gradients of gradients are asked for, which its operators do not have")


for _name in ("dispatch_backward", "combine_backward"):
    library.register_autograd(f"ferry::{_name}", _refuse_second_gradients, lib=_library)


def _recorded(operator, keep, gradients):
    """The operator, for autograd as it is without modes: fewer layers of Python than PyTorch puts in between."""

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = operator(*inputs)
            keep(ctx, inputs, output)
            return output

        backward = staticmethod(gradients)

    return Recorded


RecordedDispatch = _recorded(dispatch, _keep_of_dispatch, _gradients_of_dispatch)
RecordedCombine = _recorded(combine, _keep_of_combine, _gradients_of_combine)
