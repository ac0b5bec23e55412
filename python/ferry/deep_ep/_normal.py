"""Normal mode: one row for each token and rank, by source rank and token, with local expert ids and weights.

Compiled code does the calls. Here is what it seldom needs: the elements of handles, and operations of the arrays' framework.
"""

from __future__ import annotations

import ferry
from ferry.deep_ep import _layout, _nodes
from ferry.deep_ep._arrays import arrays_of, rounded


def element(handle, index):
    """Element `index` of a NormalHandle, apart from is_token_in_rank."""
    if handle.topology.nodes > 1:
        return _nodes.element(handle, index)
    plan, in_rank = handle.plan, handle.is_token_in_rank
    arrays = arrays_of(in_rank)
    if index == 0:
        return _layout.rank_prefix_matrix(arrays, plan.tokens_between)
    if index == 1:
        return _layout.channel_prefix_matrix(arrays, in_rank, handle.channels)
    if index == 2:
        if not handle.tokens_of_ranks:
            raise ferry.UnsupportedError(
                "handle: after a dispatch with num_worst_tokens the host does not know the other ranks' tokens")
        return _layout.recv_channel_prefix_matrix(
            arrays, _layout.sources(arrays, handle), handle.tokens_of_ranks, handle.channels)
    if index == 3:
        return arrays.contiguous(_layout.sources(arrays, handle)[:, 1])
    return _layout.send_head(arrays, in_rank, handle.channels)


def ids_from_ranks(is_token_in_rank):
    return _layout.ids_from_ranks(arrays_of(is_token_in_rank), is_token_in_rank)


def padded_columns(array, columns):
    """The array with columns of zeros at the end."""
    arrays = arrays_of(array)
    wide = arrays.full((len(array), columns), 0, arrays.type_name(array), array)
    wide[:, : array.shape[1]] = arrays.detached(array)
    return wide


def first_columns(array, columns):
    return arrays_of(array).contiguous(array[:, :columns])


def with_biases(result, biases):
    """bfloat16: the float32 `result` plus the biases."""
    arrays = arrays_of(result)
    with arrays.quietly():
        for bias in biases:
            result = result + arrays.to(arrays.contiguous(arrays.detached(bias)), "float32")  # of NumPy's subclasses only the values
        return rounded(arrays, result, "bfloat16")
