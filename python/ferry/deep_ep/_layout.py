"""Indices, counts and orders as the interface has them: functions of arrays alone."""

from __future__ import annotations

from collections.abc import Sequence

import ferry


class Tables:
    """What token_counts looks up: the rank of every expert, behind them R for slots without one; all ranks.

    On devices they are copied when made, which waits: ready for any stream.
    """

    def __init__(self, arrays, like, experts, ranks):
        placement = ferry.Placement.blocks(experts, ranks)
        places = [placement.place(expert)[0] for expert in range(experts)]
        self.rank_of_expert = arrays.of_list([*places, ranks], "int64", like)
        self.ranks = arrays.of_list(list(range(ranks)), "int64", like)


def token_counts(arrays, topk_idx, tables):
    """(tokens to each rank int32 [R], pairs of each expert int32 [E], token goes to rank bool [T, R])."""
    experts = len(tables.rank_of_expert) - 1
    # Ids out of range are those of slots without one, the last of the table from either end: dispatch reports them.
    expert = arrays.to(topk_idx, "int64").clip(-1, experts)
    in_rank = (tables.rank_of_expert[expert][:, :, None] == tables.ranks).any(1)
    per_expert = arrays.count_places(expert + 1, experts + 2)[1:-1]
    return in_rank.sum(0, dtype=arrays.type("int32")), per_expert, in_rank


def ids_of_ranks(arrays, is_token_in_rank):
    """Where no expert ids are given: one expert a rank, int32 [T, R], -1 where a token does not go."""
    ranks = is_token_in_rank.shape[1]
    numbers = arrays.arange(ranks, "int32", is_token_in_rank)
    return arrays.dense(arrays.where(is_token_in_rank, numbers[None, :] + arrays.to(is_token_in_rank, "int32") * 0, -1))


def rounded_up(counts, alignment):
    return [-(-count // alignment) * alignment for count in counts]


def rank_prefix_matrix(arrays, tokens_between):
    """int32 [R, R]: rows of sources 0 to i at rank j, i included."""
    return arrays.to(tokens_between.cumsum(0), "int32")


def channel_of_token(arrays, tokens, channels, like):
    """int64 [T]: tokens are dealt to channels in blocks of equal size."""
    block = max(1, -(-tokens // channels))
    return arrays.arange(tokens, "int64", like) // block


def channel_prefix_matrix(arrays, is_token_in_rank, channels):
    """int32 [R, C]: tokens of channels 0 to c that go to a rank, c included."""
    tokens, ranks = is_token_in_rank.shape
    channel = channel_of_token(arrays, tokens, channels, is_token_in_rank)
    places = arrays.arange(ranks, "int64", is_token_in_rank)[None, :] * channels + channel[:, None]
    counts = arrays.count(arrays.where(is_token_in_rank, places, -1), ranks * channels)
    return arrays.to(counts.reshape(ranks, channels).cumsum(1), "int32")


def recv_channel_prefix_matrix(arrays, source, tokens_of_ranks, channels):
    """int32 [R, C]: where the rows of a source's channel begin, counted from the source's first row."""
    ranks = len(tokens_of_ranks)
    blocks = arrays.of_list([max(1, -(-tokens // channels)) for tokens in tokens_of_ranks], "int64", source)
    from_rank, token = arrays.to(source[:, 0], "int64"), arrays.to(source[:, 1], "int64")
    counts = arrays.count(from_rank * channels + token // blocks[from_rank], ranks * channels).reshape(ranks, channels)
    return arrays.to(counts.cumsum(1) - counts, "int32")


def send_head(arrays, is_token_in_rank):
    """int32 [T, R]: the token's number among those that go to the rank, -1 where it does not."""
    number = arrays.to(arrays.to(is_token_in_rank, "int32").cumsum(0) - 1, "int32")
    return arrays.where(is_token_in_rank, number, -1)


def layout_range(arrays, counts):
    """int64 [L, R] of (begin << 32) | count, for counts [R, L] of the rows of every source and expert."""
    of_expert = arrays.to(counts, "int64").T
    begin = of_expert.cumsum(1) - of_expert
    return arrays.dense((begin << 32) | of_expert)


class LazyTuple(Sequence):
    """A tuple whose elements are made when they are looked at: most handles are only passed on."""

    def __init__(self, *makers):
        self._makers = makers
        self._made = {}

    def __len__(self):
        return len(self._makers)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        index = range(len(self))[index]
        if index not in self._made:
            self._made[index] = self._makers[index]()
        return self._made[index]
