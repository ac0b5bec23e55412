"""Dispatch and combine over tensors, with gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch

import ferry
from ferry.torch import _operators  # noqa: F401  (registers torch.ops.ferry)
from ferry.torch._registry import handle_of


_dispatch, _combine = torch.ops.ferry.dispatch.default, torch.ops.ferry.combine.default


def _without_gradients(tensor, weights):
    """Whether the call may go below autograd, whose layer in Python takes as long as all else of a call from it."""
    if torch.compiler.is_compiling():
        return False
    wanted = tensor.requires_grad or (weights is not None and weights.requires_grad)
    return not (wanted and torch.is_grad_enabled())


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
    if _without_gradients(x, weights):
        with torch._C._AutoDispatchBelowAutograd():
            return Rows(*_dispatch(x, ids, weights, handle, lane), x.shape[0])
    return Rows(*_dispatch(x, ids, weights, handle, lane), x.shape[0])


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
    if _without_gradients(outputs, weights):
        with torch._C._AutoDispatchBelowAutograd():
            return _combine(outputs, weights, rows.plan, rows.tokens, handle, lane)
    return _combine(outputs, weights, rows.plan, rows.tokens, handle, lane)
