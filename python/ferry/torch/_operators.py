"""The operators: kernels, fake kernels, gradients."""

from __future__ import annotations

import torch

import ferry
from ferry import _core
from ferry.torch._registry import exchange_of

_library = torch.library.Library("ferry", "DEF")
_library.define(
    "dispatch(Tensor x, Tensor ids, Tensor? weights, int exchange, int lane) -> "
    "(Tensor data, Tensor weight, Tensor counts, Tensor row_offsets, Tensor source, Tensor plan)")
_library.define("dispatch_backward(Tensor d_data, Tensor? d_weight, Tensor plan, SymInt tokens, int exchange, int lane) "
                "-> (Tensor d_x, Tensor d_weights)")
_library.define("combine(Tensor outputs, Tensor? weights, Tensor plan, SymInt tokens, int exchange, int lane) -> Tensor")
_library.define("combine_backward(Tensor d_result, Tensor outputs, Tensor? weights, Tensor plan, int exchange, int lane) "
                "-> (Tensor d_outputs, Tensor d_weight)")


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


def dispatch(x, ids, weights, exchange, lane):
    return _core._dispatch_rows(exchange_of(exchange), x, ids, weights, lane)


def _fake_dispatch(x, ids, weights, exchange, lane):
    exchange = exchange_of(exchange)
    rows, groups = _rows(exchange), _groups(exchange)

    def ints(*shape):
        return x.new_empty(shape, dtype=torch.int32)

    return (x.new_empty(_rows_shape(exchange)), x.new_empty((rows,), dtype=torch.float32), ints(groups),
            ints(groups + 1), ints(rows, 3), _plan_memory(exchange, x))


def _dispatch_backward(d_data, d_weight, plan, tokens, exchange, lane):
    exchange, d_data = exchange_of(exchange), d_data.contiguous()
    if d_weight is None:
        return _core._combine_rows(exchange, d_data, None, plan, tokens, lane), d_data.new_empty((0,), dtype=torch.float32)
    return _core._combine_rows(exchange, d_data, None, plan, tokens, lane, d_weight.contiguous())


def _fake_dispatch_backward(d_data, d_weight, plan, tokens, exchange, lane):
    config = exchange_of(exchange).config
    weights = (0,) if d_weight is None else (tokens, config.top_k)
    return d_data.new_empty((tokens, config.hidden)), d_data.new_empty(weights, dtype=torch.float32)


def _dense(given):  # what is no tensor is left for the module to refuse
    return given.contiguous() if isinstance(given, torch.Tensor) else given


def combine(outputs, weights, plan, tokens, exchange, lane):
    return _core._combine_rows(exchange_of(exchange), _dense(outputs), _dense(weights), plan, tokens, lane)


def _fake_combine(outputs, weights, plan, tokens, exchange, lane):
    return outputs.new_empty((tokens, exchange_of(exchange).config.hidden))


def _combine_backward(d_result, outputs, weights, plan, exchange, lane):
    hidden = outputs.shape[-1]
    count = outputs.numel() // hidden
    multiplied = None if weights is None else outputs.contiguous()
    data, dots = _core._gradient_rows(exchange_of(exchange), d_result.contiguous(), multiplied, plan, count, lane)
    d_rows = data.reshape(-1, hidden)[:count]
    if weights is None:
        return d_rows.reshape(outputs.shape).to(outputs.dtype), d_rows.new_empty((0,), dtype=torch.float32)
    scale = weights[:count, None]
    if d_rows.dtype == outputs.dtype:  # in fp32, rounded once, without a copy in fp32
        d_rows.mul_(scale)
    else:
        d_rows = (d_rows.float() * scale).to(outputs.dtype)
    return d_rows.reshape(outputs.shape), dots[: len(weights)]


def _fake_combine_backward(d_result, outputs, weights, plan, exchange, lane):
    shape = (0,) if weights is None else (weights.shape[0],)
    return outputs.new_empty(outputs.shape), outputs.new_empty(shape, dtype=torch.float32)


for _name, _kernel, _fake in (
    ("dispatch", dispatch, _fake_dispatch),
    ("dispatch_backward", _dispatch_backward, _fake_dispatch_backward),
    ("combine", combine, _fake_combine),
    ("combine_backward", _combine_backward, _fake_combine_backward),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _key)
    torch.library.register_fake(f"ferry::{_name}", _fake, lib=_library)


def _keep_of_dispatch(ctx, inputs, output):
    x, _, weights, ctx.exchange, ctx.lane = inputs
    ctx.tokens, ctx.weighted = x.shape[0], weights is not None
    ctx.save_for_backward(output[5])
    ctx.mark_non_differentiable(*output[2:])


def _gradients_of_dispatch(ctx, d_data, d_weight, *_):
    (plan,) = ctx.saved_tensors
    d_x, d_weights = torch.ops.ferry.dispatch_backward.default(
        d_data, d_weight if ctx.weighted else None, plan, ctx.tokens, ctx.exchange, ctx.lane)
    return d_x, None, d_weights if ctx.weighted else None, None, None


def _keep_of_combine(ctx, inputs, output):
    outputs, weights, plan, _, ctx.exchange, ctx.lane = inputs
    ctx.weighted = weights is not None
    ctx.save_for_backward(*((outputs, plan, weights) if ctx.weighted else (outputs, plan)))


def _gradients_of_combine(ctx, d_result):
    outputs, plan, *weights = ctx.saved_tensors
    d_outputs, d_weight = torch.ops.ferry.combine_backward.default(
        d_result, outputs, weights[0] if weights else None, plan, ctx.exchange, ctx.lane)
    return d_outputs, d_weight if ctx.weighted else None, None, None, None, None


torch.library.register_autograd(
    "ferry::dispatch", _gradients_of_dispatch, setup_context=_keep_of_dispatch, lib=_library)
torch.library.register_autograd("ferry::combine", _gradients_of_combine, setup_context=_keep_of_combine, lib=_library)


class RecordedDispatch(torch.autograd.Function):
    """The operator, for autograd as it is without modes: fewer layers of Python than PyTorch puts in between."""

    @staticmethod
    def forward(ctx, *inputs):
        output = dispatch(*inputs)
        _keep_of_dispatch(ctx, inputs, output)
        return output

    backward = staticmethod(_gradients_of_dispatch)


class RecordedCombine(torch.autograd.Function):
    """As RecordedDispatch."""

    @staticmethod
    def forward(ctx, *inputs):
        output = combine(*inputs)
        _keep_of_combine(ctx, inputs, output)
        return output

    backward = staticmethod(_gradients_of_combine)
