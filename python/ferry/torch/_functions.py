"""Dispatch and combine over tensors, with gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch

import ferry
from ferry.torch import _operators  # noqa: F401  (registers torch.ops.ferry)
from ferry.torch._registry import handle_of


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
    return Rows(*torch.ops.ferry.dispatch(x, ids, weights, handle, lane), tokens=x.shape[0])


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
    return torch.ops.ferry.combine(outputs, weights, rows.plan, rows.tokens, handle, lane)
