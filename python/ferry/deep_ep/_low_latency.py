"""Low-latency mode: what handles compute on first access, and weights of masked slots. Compiled code does the calls."""

from __future__ import annotations

from ferry.deep_ep import _layout
from ferry.deep_ep._arrays import arrays_of


def src_info(handle):
    """int32 [L, R*M]: the token that each row was at its source rank."""
    experts, rows = handle.shape
    source = handle.plan.sources[: experts * rows]  # a plan has room for the rank with the most rows
    return arrays_of(source).contiguous(source[:, 1].reshape(experts, rows))


def layout_range(handle):
    """int64 [L, R]: (first row << 32) | rows of each expert and source rank."""
    counts = handle.plan.counts
    mine = handle.exchange.config.placement.experts_of(handle.exchange.rank)
    return _layout.layout_range(arrays_of(counts), counts[:, mine[0] : mine[-1] + 1] if mine else counts[:, :0])


def masked_weights(topk_idx, topk_weights):
    """The weights, 0 where topk_idx is -1."""
    arrays = arrays_of(topk_weights)
    return arrays.contiguous(arrays.where(topk_idx >= 0, topk_weights, 0))
