"""Dispatch and combine over tensors, with gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch

import ferry
from ferry.torch import _operators
from ferry.torch._registry import handle_of


_dispatch, _combine = torch.ops.ferry.dispatch.default, torch.ops.ferry.combine.default


def _is_plain(tensor, indices, weights):
    """Whether PyTorch would do nothing but call the kernel: no gradient to record, nobody who traces or watches.

    Its own way there, through autograd's layer in Python, takes longer than the rest of a call from Python.
    """
    if torch.compiler.is_compiling():
        return False
    plain = torch.Tensor
    if type(tensor) is not plain or type(indices) is not plain or not (weights is None or type(weights) is plain):
        return False
    if not (tensor.is_cuda or tensor.is_cpu):
        return False
    if torch.is_grad_enabled() and (tensor.requires_grad or (weights is not None and weights.requires_grad)):
        return False
    c = torch._C
    modes = c._len_torch_dispatch_stack() + c._len_torch_function_stack()
    transformed = c._functorch.maybe_current_level() is not None
    return not (modes or transformed or c._get_tracing_state() or torch.autograd._profiler_enabled())


class Rows(NamedTuple):
    """What dispatch returns. R rows there is room for, G groups; rows past the last are zero."""

    data: torch.Tensor
    """[R, H], or [L, capacity, H] in the padded layout."""
    weight: torch.Tensor
    """float32 [R]: the weights that travelled; 0 without."""
    counts: torch.Tensor
    """int32 [G]: rows of each group."""
    row_offsets: torch.Tensor
    """int32 [G + 1]: first row of each group."""
    source: torch.Tensor
    """int32 [R, 3]: rank, token and slot of each row."""
    plan: torch.Tensor
    """uint8: the plan's storage."""
    tokens: int
    """N of this rank."""


def dispatch(
    exchange: ferry.Exchange | int,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    lane: int = 0,
) -> Rows:
    """Sends `x` [N, H] to the experts `ids` [N, K], -1 for none, with `weights` float32 [N, K].

    `exchange`: or its number, handle_of(exchange), which torch.compile traces. Gradients: of x and weights. Raises
    ferry.UsageError for layouts and formats without gradients, and what Exchange.dispatch raises.
    """
    handle = exchange if isinstance(exchange, int) else handle_of(exchange)
    operator = _operators.dispatch if _is_plain(x, ids, weights) else _dispatch
    return Rows(*operator(x, ids, weights, handle, lane), x.shape[0])


def combine(
    exchange: ferry.Exchange | int,
    outputs: torch.Tensor,
    rows: Rows,
    *,
    weights: torch.Tensor | None = None,
    lane: int = 0,
) -> torch.Tensor:
    """Brings `outputs`, row for row as rows.data lay, home: [N, H]. `weights`: rows.weight, or None for 1.

    Gradients: of outputs and weights. On devices, fewer outputs than rows.data has are the caller's word that no row
    lies past them.
    """
    handle = exchange if isinstance(exchange, int) else handle_of(exchange)
    operator = _operators.combine if _is_plain(outputs, rows.plan, weights) else _combine
    return operator(outputs, weights, rows.plan, rows.tokens, handle, lane)
