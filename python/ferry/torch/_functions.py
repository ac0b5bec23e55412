"""Dispatch and combine over tensors, with gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch

import ferry
from ferry._core import _SOURCES_AT
from ferry.torch import _operators
from ferry.torch._registry import handle_of


def _registered_combine(*inputs):
    return torch.ops.ferry.combine.default(*inputs)[0]


_REGISTERED = torch.ops.ferry.dispatch.default, _registered_combine
_KERNELS = _operators.dispatch, _operators.combine
_RECORDED = _operators.RecordedDispatch.apply, _operators.RecordedCombine.apply


def _operators_for(tensor, indices, weights):
    """Dispatch and combine: the registered ones where somebody watches, else what PyTorch would run then."""
    plain = torch.Tensor
    if type(tensor) is not plain or type(indices) is not plain or not (weights is None or type(weights) is plain):
        tensors = isinstance(tensor, plain) and isinstance(indices, plain) and isinstance(weights, (plain, type(None)))
        return _REGISTERED if tensors else _KERNELS  # which refuse what is no tensor, also for the peers
    if not (tensor.is_cuda or tensor.is_cpu) or not _operators.nobody_watches():
        return _REGISTERED
    wanted = tensor.requires_grad or (weights is not None and weights.requires_grad)
    return _RECORDED if wanted and torch.is_grad_enabled() else _KERNELS


def _new_call(like):
    """What no other call of compiled code has. Only allocations are never taken for one another."""
    return torch.empty(0, dtype=torch.uint8, device=like.device)


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
    plan: torch.Tensor
    """uint8: the plan's storage."""
    tokens: int
    """N of this rank."""

    @property
    def source(self) -> torch.Tensor:
        """int32 [R, 3]: rank, token and slot of each row, as they lie in the plan. Not to be changed."""
        end = _SOURCES_AT + 12 * self.weight.shape[0]
        return self.plan[_SOURCES_AT:end].view(torch.int32).view(-1, 3)


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
    if torch.compiler.is_compiling():
        operator, call = _REGISTERED[0], _new_call(x)
    else:
        operator, call = _operators_for(x, ids, weights)[0], None
    return Rows(*operator(x, ids, weights, handle, lane, call), x.shape[0])


def combine(
    exchange: ferry.Exchange | int,
    outputs: torch.Tensor,
    rows: Rows,
    *,
    row_weights: torch.Tensor | None = None,
    lane: int = 0,
) -> torch.Tensor:
    """Brings `outputs`, row for row as rows.data lay, home: [N, H]. `weights`: rows.weight, or None for 1.

    Gradients: of outputs and weights. On devices, fewer outputs than rows.data has are the caller's word that no row
    lies past them.
    """
    handle = exchange if isinstance(exchange, int) else handle_of(exchange)
    if torch.compiler.is_compiling():
        operator, call = _REGISTERED[1], _new_call(outputs)
    else:
        operator, call = _operators_for(outputs, rows.plan, row_weights)[1], None
    return operator(outputs, row_weights, rows.plan, rows.tokens, handle, lane, call)
