"""EPHandle: the routes of a dispatch of ElasticBuffer."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import ferry
from ferry.deep_ep._arrays import arrays_of

ROUTES = 2  # the first columns of recv_src_metadata are the token and its source; the others are its routes here


class EPHandle:
    """The routes of a dispatch, for combine and for dispatches of other rows by the same routes.

    R ranks, M = num_max_tokens_per_rank, L experts on this rank, K slots a token, N tokens of this rank, A = expert_alignment.
    Arrays lie where the tokens lay. They are computed when they are first read, behind the dispatch, and belong to the
    reader: calls by the handle do not read them.

    do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: of the dispatch.
    topk_idx: [N, K], a copy of the given one, or with do_handle_copy=False that one.
    num_recv_tokens_per_expert_list: L numbers of rows, rounded up to multiples of A; [] without do_cpu_sync.
    num_expanded_tokens: rows of the expanded layout, padding included; without do_cpu_sync those there was room for.
    token_metadata_at_forward, channel_linked_list: None, because ranks are one domain.
    exchange, plan: Ferry's, which calls by the handle use.
    """

    token_metadata_at_forward = None
    channel_linked_list = None

    def __init__(self, exchanges: Any, exchange: ferry.Exchange, call: Any, plan: ferry.Plan, received: Any, lists: list[int] | None):
        """`call`: the Routes of the dispatch; `lists`: num_recv_tokens_per_expert_list, None without do_cpu_sync."""
        self.exchanges = exchanges  # of the ElasticBuffer
        self.do_expand = call.shape.do_expand
        self.num_experts = call.shape.num_experts
        self.expert_alignment = call.expert_alignment
        self.num_max_tokens_per_rank = call.max_tokens
        self.num_sms = call.num_sms
        self.topk_idx = call.topk_idx
        self.num_recv_tokens_per_expert_list = lists or []
        self.num_expanded_tokens = call.most_expanded if lists is None else sum(lists)
        self.exchange = exchange
        self.plan = plan
        self.memory = received.plan  # of the plan
        self.rows: int = received.rows
        self.local_ids = received.ids  # plain layout: int32 [rows, K]
        self.event = None  # of an asynchronous dispatch
        self._counted = lists is not None

    @cached_property
    def num_recv_tokens(self) -> int:
        """Tokens with an expert here. After a dispatch without do_cpu_sync R * M, the most there may be."""
        if not self._counted:
            return self.exchange.ranks * self.num_max_tokens_per_rank
        return int(self.psum_num_recv_tokens_per_scaleup_rank[-1]) if self.do_expand else self.rows

    @cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> Any:
        """int32 [R]: at [r] the tokens with an expert here from ranks 0 to r."""
        between = self._plan().tokens_between[:, self.exchange.rank]
        return arrays_of(between).to(between.cumsum(0), "int32")

    @cached_property
    def num_unaligned_recv_tokens_per_expert(self) -> Any:
        """int32 [L]: rows of each expert."""
        counts = self._plan().counts
        mine = self.exchange.config.placement.experts_of(self.exchange.rank)
        own = counts[:, mine[0] : mine[-1] + 1] if mine else counts[:, :0]
        return arrays_of(counts).to(own.sum(0), "int32")

    @cached_property
    def psum_num_recv_tokens_per_expert(self) -> Any:
        """int32 [L]: at [e] the rows of experts 0 to e, each rounded up to a multiple of A; with do_expand that of e is not."""
        self._plan()
        counts, rounded = self.num_unaligned_recv_tokens_per_expert, self._rounded_counts()
        sums = rounded.cumsum(0)
        return arrays_of(counts).to(sums - rounded + counts if self.do_expand else sums, "int32")

    @cached_property
    def recv_src_metadata(self) -> Any:
        """int32 [num_recv_tokens, 2 + K], a row for each token with an expert here, by source rank and token; then -1.

        [:, 0]: source rank * M + token. [:, 1]: source rank * K + its first slot with an expert here. [:, 2:]: with do_expand
        the row of each slot, -1 where its expert is elsewhere; otherwise -1.
        """
        table = self._expanded_table() if self.do_expand else self._plain_table()
        return table[: self.num_recv_tokens]

    @cached_property
    def dst_buffer_slot_idx(self) -> Any:
        """int32 [N, K]: the row of each slot on the rank of its expert; -1 where it has none."""
        rows = self._plan().rows
        return arrays_of(rows).copy(rows)

    def padding(self) -> Any:
        """bool [rows]: the rows that align experts. Rows past the last expert may count as such."""
        arrays, rows, sources = self._sources()
        padding = arrays.full((rows,), True, "bool", sources)
        padding[: len(sources)] = sources[:, 0] < 0
        return padding

    def _plan(self) -> ferry.Plan:
        if self.event is not None:
            self.event.current_stream_wait()
        return self.plan

    def _rounded_counts(self) -> Any:
        counts, alignment = self.num_unaligned_recv_tokens_per_expert, self.expert_alignment
        return (counts + (alignment - 1)) // alignment * alignment

    def _sources(self) -> tuple[Any, int, Any]:
        """The framework of the arrays, the number of rows, and int32 [at most rows, 3]: source rank, token and slot of rows."""
        sources = self._plan().sources[: self.rows]
        return arrays_of(sources), self.rows, sources

    def _plain_table(self) -> Any:
        arrays, rows, sources = self._sources()
        slots = self.topk_idx.shape[1]
        table = arrays.full((rows, ROUTES + slots), -1, "int32", sources)
        received = arrays.arange(rows, "int32", sources) < self.psum_num_recv_tokens_per_scaleup_rank[-1]
        rank, token = sources[:, 0], sources[:, 1]
        first = _first_slot(arrays, self.local_ids[:rows] >= 0)
        table[:, 0] = arrays.where(received, rank * self.num_max_tokens_per_rank + token, -1)
        table[:, 1] = arrays.where(received, rank * slots + first, -1)
        return table

    def _expanded_table(self) -> Any:
        arrays, rows, sources = self._sources()
        slots, tokens = self.topk_idx.shape[1], self.exchange.ranks * self.num_max_tokens_per_rank
        index = arrays.arange(len(sources), "int64", sources)
        used = (index < self._rounded_counts().sum()) & (sources[:, 0] >= 0)
        token = arrays.to(sources[:, 0], "int64") * self.num_max_tokens_per_rank + sources[:, 1]
        # All lengths are known to the host, so nothing here waits for a GPU: rows that are not used meet in a last row.
        routes = arrays.full((tokens + 1, slots), -1, "int32", sources)
        routes[arrays.where(used, token, tokens), arrays.where(used, arrays.to(sources[:, 2], "int64"), 0)] = (
            arrays.to(index, "int32"))
        here = routes[:tokens] >= 0
        present = here.any(1)
        place = arrays.where(present, arrays.to(present, "int64").cumsum(0) - 1, tokens)
        table = arrays.full((tokens + 1, ROUTES + slots), -1, "int32", sources)
        number = arrays.arange(tokens, "int32", sources)
        table[place, 0] = number
        table[place, 1] = number // self.num_max_tokens_per_rank * slots + _first_slot(arrays, here)
        table[place, ROUTES:] = routes[:tokens]
        return table[:tokens]


def _first_slot(arrays: Any, here: Any) -> Any:
    """int32 [rows]: the first true column of each row of a matrix of bool."""
    return arrays.to(arrays.to(here, "int32").argmax(1), "int32")
