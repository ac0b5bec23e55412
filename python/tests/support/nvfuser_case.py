"""A random case of nvFuser's calls, with loops written from docs/guides/nvfuser.md."""

import numpy as np

import ferry
import ferry.nvfuser
from format_loops import TYPES
from random_cases import F, Ranks, numbers, one_of


class NvfuserCase:
    """Dispatches of a group with any placement, and the combine of one of them."""

    def __init__(self, draw, dtype, ranks=None):
        self.step = step = Ranks(draw, repeats=False, ranks=ranks)
        self.dtype, self.hidden = dtype, 8 * int(draw.integers(1, 9))
        self.tokens = [numbers(draw, (count, self.hidden), TYPES[dtype]) for count in step.counts]
        self.where = step.where(draw)
        self.flat, self.own_memory, self.earlier = (bool(draw.random() < 0.5) for _ in range(3))
        self.seed = int(draw.integers(1 << 31))

    def targets(self, source, token):
        return sorted({int(self.step.owner[expert]) for expert in self.step.ids[source][token] if expert >= 0})

    def output(self, rank, source, token):
        """What the experts of a rank return for a token."""
        return numbers(np.random.default_rng([self.seed, rank, source, token]), (self.hidden,), TYPES[self.dtype])

    def rows_of(self, rank):
        """(source, token) of the rows that a rank receives, in their order."""
        step = self.step
        rows = [(source, token) for source in range(step.ranks) for token in range(step.counts[source]) if rank in self.targets(source, token)]
        if step.top_k == 1:
            rows.sort(key=lambda row: step.ids[row[0]][row[1], 0])
        return rows

    def check_dispatch(self, received, rank):
        """`received`: NumPy arrays."""
        step, rows, experts = self.step, self.rows_of(rank), self.step.experts_of(rank)
        assert received.recv_x.tobytes() == b"".join(self.tokens[source][token].tobytes() for source, token in rows)
        assert received.recv_x.shape == (len(rows), self.hidden) and received.recv_x.dtype == TYPES[self.dtype]
        ids = [[experts.index(expert) if expert in experts else -1 for expert in step.ids[source][token]] for source, token in rows]
        if step.top_k == 1:
            ids = [step.ids[source][token, 0] for source, token in rows]
        assert received.recv_topk_idx.tolist() == ids
        assert received.recv_src_idx.tolist() == [token for _, token in rows]
        assert received.recv_src_rank.tolist() == [source for source, _ in rows]
        assert received.n_tokens_to_rank.tolist() == [
            sum(peer in self.targets(rank, token) for token in range(step.counts[rank])) for peer in range(step.ranks)]
        assert received.n_tokens_from_rank.tolist() == [sum(row[0] == peer for row in rows) for peer in range(step.ranks)]
        assert all(array.dtype == np.int64 for array in received[1:])
        return rows

    def check(self, group, me, to=lambda array: array, back=lambda array: array, **where):
        """As rank `me`. `to` makes the arguments of NumPy arrays, and `back` NumPy arrays of the results."""
        step = self.step
        exchange = ferry.nvfuser.Exchange(group, experts=step.experts, top_k=step.top_k, hidden=self.hidden, max_tokens=step.most,
                                          dtype=self.dtype, placement=step.placement, **(where or self.where))
        x, ids = to(self.tokens[me]), to(step.ids[me][:, 0] if self.flat and step.top_k == 1 else step.ids[me])
        memory = to(np.full((exchange.capacity + 2, self.hidden), 7, TYPES[self.dtype])) if self.own_memory else None
        received = exchange.dispatch(x, ids, recv_x=memory)
        rows = self.check_dispatch(ferry.nvfuser.DispatchResult(*map(back, received)), me)
        assert memory is None or back(memory[: len(rows)]).tobytes() == back(received.recv_x).tobytes()
        given = {"out": to(np.full(self.tokens[me].shape, 7, TYPES[self.dtype]))} if self.own_memory else {}
        if self.earlier:  # another dispatch between
            count = step.counts[me] // 2
            exchange.dispatch(x[:count], ids[:count])
            given["tokens"] = step.counts[me]
        outputs = np.array([self.output(me, *row) for row in rows], TYPES[self.dtype]).reshape(-1, self.hidden)
        y = exchange.combine(to(outputs), *received[2:], **given)
        assert y is given.get("out", y)
        expected = np.zeros((step.counts[me], self.hidden), F)
        for token in range(step.counts[me]):
            for target in self.targets(me, token):
                expected[token] += self.output(target, me, token).astype(F)
        expected = expected.astype(TYPES[self.dtype])
        y = back(y)
        assert y.dtype == expected.dtype and y.shape == expected.shape and y.tobytes() == expected.tobytes()
