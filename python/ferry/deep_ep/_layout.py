"""The indices, counts and prefix sums that handles of deep_ep contain, as functions of arrays."""

from __future__ import annotations

import ferry
from ferry._core import _MOST_SLOTS as MOST_SLOTS
from ferry.deep_ep._arrays import arrays_of


def ids_from_map(arrays, goes, slots=MOST_SLOTS):
    """(ids, left_out) of bool [T, C]: where each token goes, and int32 [T], not negative where a token has more than `slots`.

    ids: int32 [T, min(C, slots)], the columns of a row that are True, ascending, and -1. left_out is None if C <= slots.
    """
    columns = goes.shape[1]
    numbers = arrays.arange(columns, "int32", goes)
    ids = arrays.where(goes, numbers[None, :] + arrays.to(goes, "int32") * 0, -1)
    if columns <= slots:
        return arrays.contiguous(ids), None
    ids = arrays.sorted_rows(ids)
    return arrays.contiguous(ids[:, columns - slots :]), ids[:, columns - slots - 1]


def ids_from_ranks(arrays, is_token_in_rank):
    """Ids for a dispatch without expert ids: one expert a rank, int32 [T, min(R, MOST_SLOTS)], -1 where a token does not go."""
    ids, left_out = ids_from_map(arrays, is_token_in_rank)
    if left_out is not None and len(left_out) and int(left_out.max()) >= 0:
        raise ferry.UsageError(f"dispatch: without topk_idx a token may go to {MOST_SLOTS} ranks, and one goes to more")
    return ids


def rank_prefix_matrix(arrays, tokens_between):
    """int32 [R, R]: at [i, j] the rows on rank j from source ranks 0 to i."""
    return arrays.to(tokens_between.cumsum(0), "int32")


def channel_of_token(arrays, tokens, channels, like):
    """int64 [T]: the channel of each token; channels are blocks of neighbouring tokens of equal size."""
    block = max(1, -(-tokens // channels))
    return arrays.arange(tokens, "int64", like) // block


def channel_prefix_matrix(arrays, is_token_in_rank, channels):
    """int32 [R, C]: at [r, c] the tokens of channels 0 to c that go to rank r."""
    tokens, ranks = is_token_in_rank.shape
    channel = channel_of_token(arrays, tokens, channels, is_token_in_rank)
    cells = arrays.arange(ranks, "int64", is_token_in_rank)[None, :] * channels + channel[:, None]
    counts = arrays.count(arrays.where(is_token_in_rank, cells, -1), ranks * channels)
    return arrays.to(counts.reshape(ranks, channels).cumsum(1), "int32")


def recv_channel_prefix_matrix(arrays, source, tokens_of_ranks, channels):
    """int32 [R, C]: first row of each source rank's channel, counted from that rank's first row."""
    ranks = len(tokens_of_ranks)
    blocks = arrays.from_list([max(1, -(-tokens // channels)) for tokens in tokens_of_ranks], "int64", source)
    from_rank, token = arrays.to(source[:, 0], "int64"), arrays.to(source[:, 1], "int64")
    counts = arrays.count(from_rank * channels + token // blocks[from_rank], ranks * channels).reshape(ranks, channels)
    return arrays.to(counts.cumsum(1) - counts, "int32")


def send_head(arrays, goes, channels):
    """int32 [T, D]: the token's index among the tokens of its channel that go to the destination; -1 if it does not."""
    tokens = len(goes)
    count = arrays.to(goes, "int64")
    before = count.cumsum(0) - count
    block = max(1, -(-tokens // channels))
    first_of_channel = channel_of_token(arrays, tokens, channels, goes) * block
    return arrays.where(goes, arrays.to(before - before[first_of_channel], "int32"), -1)


def sources(arrays, handle):
    """int32 [rows, 3]: source rank, token and slot of the received rows."""
    plan = handle.plan
    tokens = arrays.on_host(plan.tokens_between)[:, handle.exchange.rank].sum()
    return plan.sources[: min(int(tokens), handle.rows)]


def src_info(handle):
    """Low latency, int32 [L, R*M]: the token that each row was at its source rank."""
    experts, rows = handle.shape
    source = handle.plan.sources[: experts * rows]  # a plan has room for the rank with the most rows
    return arrays_of(source).contiguous(source[:, 1].reshape(experts, rows))


def layout_range(handle):
    """Low latency, int64 [L, R]: (first row << 32) | rows of each expert and source rank."""
    counts = handle.plan.counts
    mine, arrays = handle.exchange.config.placement.experts_of(handle.exchange.rank), arrays_of(counts)
    of_expert = arrays.to(counts[:, mine[0] : mine[-1] + 1] if mine else counts[:, :0], "int64").T
    begin = of_expert.cumsum(1) - of_expert
    return arrays.contiguous((begin << 32) | of_expert)


def masked_weights(topk_idx, topk_weights):
    """The weights, 0 where topk_idx is -1."""
    arrays = arrays_of(topk_weights)
    return arrays.contiguous(arrays.where(topk_idx >= 0, topk_weights, 0))
