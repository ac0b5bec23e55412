"""Random cases of ferry.deep_ep.HybridEPBuffer, what its calls return by plain loops, and the calls with every check."""

import dataclasses

import numpy as np

import ferry.deep_ep as deep_ep
from deep_ep_steps import fp8
from oracle import bf16, same_bits

HIDDEN, MOST = 256, 9


@dataclasses.dataclass
class Case:
    """One step of all ranks: lists by rank. `nodes`: the node of each rank."""

    nodes: list
    local: int  # experts of a rank
    maps: list  # bool [T, E]
    probs: list  # float32 [T, E]
    hidden: list  # bfloat16 [T, H]

    @property
    def ranks(self):
        return len(self.maps)

    @property
    def experts(self):
        return self.ranks * self.local

    def mine(self, me):
        return range(me * self.local, (me + 1) * self.local)

    def groups(self, me):
        """For each expert of a rank its rows: (source rank, token)."""
        return [[(s, t) for s in range(self.ranks) for t in range(len(self.maps[s])) if self.maps[s][t, e]] for e in self.mine(me)]

    def tokens(self, me):
        """(source rank, token) of every token with an expert on a rank."""
        return [(s, t) for s in range(self.ranks) for t in range(len(self.maps[s])) if self.maps[s][t, self.mine(me)].any()]

    def same_node(self, me):
        return [rank for rank in range(self.ranks) if self.nodes[rank] == self.nodes[me]]

    def permuted(self, me, pad=1, limit=None):
        """(rows, tokens_per_expert): a row is (source rank, token, expert), or None for padding; those past `limit` are cut off."""
        rows, counts = [], []
        for expert, group in zip(self.mine(me), self.groups(me)):
            begin = len(rows)
            rows += [(*row, expert) for row in group] + [None] * (-len(group) % pad)
            rows = rows[:limit]
            counts.append(len(rows) - begin)
        return rows, counts

    def total(self, me, pad):
        return len(self.permuted(me, pad)[0])


def random_case(rng, ranks, nodes=None, local=4, most=MOST, density=0.3, skew=False):
    """Some ranks have no tokens. `skew`: all tokens go to the experts of one rank, and to one of them always."""
    experts, tokens = ranks * local, [int(rng.integers(0, most + 1)) for _ in range(ranks)]
    maps = [rng.random((n, experts)) < density for n in tokens]
    if skew:
        hot = int(rng.integers(ranks)) * local
        for routing_map in maps:
            routing_map[:, :hot] = routing_map[:, hot + local:] = False
            routing_map[:, hot] = True
    probs = [np.where(m, rng.random(m.shape, np.float32), np.float32(0)) for m in maps]
    return Case(nodes or [0] * ranks, local, maps, probs, [rng.standard_normal((n, HIDDEN)).astype(bf16) for n in tokens])


def slots_of(case, me, rng):
    """(topk_idx int64 [T, K], topk_weights float32 [T, K]) with the experts of the map in any order, and -1."""
    columns = max([1, *(int(row.sum()) for routing_map in case.maps for row in routing_map)])
    ids, weights = np.full((len(case.maps[me]), columns), -1), np.zeros((len(case.maps[me]), columns), np.float32)
    for token, row in enumerate(case.maps[me]):
        chosen = rng.permutation(np.flatnonzero(row))
        places = rng.permutation(columns)[: len(chosen)]
        ids[token, places], weights[token, places] = chosen, case.probs[me][token, chosen]
    return ids, weights


def sums(case, me, value, kept=lambda source, token, expert: True):
    """bfloat16 [T, H]: fp32 sums of `value` over the experts of a rank, rounded; then over ranks, and on several nodes over
    each node, rounded, and nodes."""
    result = np.zeros(case.hidden[me].shape, np.float32)
    for token in range(len(result)):
        of_nodes = []
        for node in sorted(set(case.nodes)):
            of_ranks = [[e for e in case.mine(rank) if case.maps[me][token, e] and kept(me, token, e)]
                        for rank in range(case.ranks) if case.nodes[rank] == node]
            of_ranks = [sum((value(me, token, e).astype(np.float32) for e in experts), np.zeros(HIDDEN, np.float32)).astype(bf16)
                        for experts in of_ranks if experts]
            if of_ranks:
                of_nodes.append(sum((s.astype(np.float32) for s in of_ranks), np.zeros(HIDDEN, np.float32)))
        if len(set(case.nodes)) > 1:
            of_nodes = [total.astype(bf16).astype(np.float32) for total in of_nodes]
        result[token] = sum(of_nodes, np.zeros(HIDDEN, np.float32))
    return result.astype(bf16)


class Steps:
    """The calls of one rank. `put` makes an array of the framework from one of NumPy, `get` the other way."""

    def __init__(self, case, me, buffer, put=lambda array: array, get=lambda array: array):
        self.case, self.me, self.buffer, self.put, self.get = case, me, buffer, put, get
        self.x, self.map, self.probs = (put(array[me]) for array in (case.hidden, case.maps, case.probs))

    def routes(self, rng, by):
        """The arguments that give the routes and probabilities: by "map" or by "ids"."""
        if by == "map":
            return {"routing_map": self.map, "probs": self.probs}
        ids, weights = slots_of(self.case, self.me, rng)
        return {"topk_idx": self.put(ids), "topk_weights": self.put(weights), "num_of_experts": self.case.experts}

    def output(self, rows):
        """What the experts return: of each row a function of it and its number, so that no two rows are alike."""
        factors = 1 + np.arange(len(rows), dtype=np.float32)[:, None] / 64
        return (rows.astype(np.float32) * factors).astype(bf16)

    def check_permuted(self, pad=None, limit=None, by="map", rng=None, **settings):
        """dispatch_with_permute and combine_with_unpermute, each again by the handle. Returns the handle."""
        case, me, get, buffer = self.case, self.me, self.get, self.buffer
        hidden, probs, factors, counts, handle = buffer.dispatch_with_permute(
            hidden=self.x, pad_multiple=pad, num_permuted_tokens=limit, **self.routes(rng, by), **settings)
        rows, expected = case.permuted(me, pad or 1, limit)
        total = case.total(me, pad or 1)
        assert hidden.shape == (len(rows) if limit is None else limit, HIDDEN) and factors is None
        assert get(counts).dtype == np.int64 and get(counts).tolist() == expected
        assert same_bits(get(hidden)[: len(rows)], self.rows_of(rows, case.hidden))
        assert same_bits(get(probs)[: len(rows)], np.array([0 if r is None else case.probs[r[0]][r[1], r[2]] for r in rows], np.float32))
        self.check_handle(handle, rows, total, limit)
        self.check_unpermuted_sums(handle, rows, pad, limit, len(hidden))
        gradient = self.put(case.hidden[me][::-1].copy())
        limits = {} if limit is None else {"num_permuted_tokens": limit}
        again, none, _, of_handle, same = buffer.dispatch_with_permute(hidden=gradient, handle=handle, pad_multiple=pad, **limits)
        assert none is None and of_handle is None and same is handle and again.shape == hidden.shape
        assert same_bits(get(again)[: len(rows)], self.rows_of(rows, [x[::-1] for x in case.hidden]))
        again, again_probs, *_ = buffer.dispatch_with_permute(hidden=self.x, handle=handle, **self.routes(rng, by))
        assert same_bits(get(again)[: len(rows)], get(hidden)[: len(rows)])
        assert same_bits(get(again_probs)[: len(rows)], get(probs)[: len(rows)])
        return handle

    def rows_of(self, rows, hidden):
        return np.array([np.zeros(HIDDEN, bf16) if r is None else hidden[r[0]][r[1]] for r in rows], bf16).reshape(-1, HIDDEN)

    def check_handle(self, handle, rows, total, limit):
        case, me, get = self.case, self.me, self.get
        assert len(handle) == len(list(handle)) == 11
        assert get(handle[3]).tolist() == [len(case.tokens(me))] and get(handle[3]).dtype == np.int32
        assert get(handle[7]).tolist() == [sum(r is not None and r[2] == e for r in rows) for e in case.mine(me)]
        assert handle[8] == len(case.maps[me]) and handle[9].hidden_dim == HIDDEN
        assert get(handle[-1]).tolist() == [int(limit is not None and total > limit)] and get(handle[-1]).dtype == np.int32

    def check_unpermuted_sums(self, handle, rows, pad, limit, length):
        case, me, get = self.case, self.me, self.get
        places = [{row: place for place, row in enumerate(case.permuted(rank, pad or 1, limit)[0]) if row} for rank in range(case.ranks)]
        there = [self.output(self.rows_of(case.permuted(rank, pad or 1, limit)[0], case.hidden)) for rank in range(case.ranks)]

        def kept(source, token, expert):
            return (source, token, expert) in places[expert // case.local]

        def value(source, token, expert):
            return there[expert // case.local][places[expert // case.local][source, token, expert]]

        outputs, numbers = np.full((length, HIDDEN), np.nan, bf16), np.full(length, np.nan, np.float32)
        outputs[: len(rows)] = there[me]
        numbers[: len(rows)] = 100 * me + np.arange(len(rows))
        y, by_expert = self.buffer.combine_with_unpermute(
            hidden=self.put(outputs), probs=self.put(numbers), handle=handle, pad_multiple=pad)
        assert same_bits(get(y), sums(case, me, value, kept))
        expected = np.zeros(case.maps[me].shape, np.float32)
        for token, expert in np.argwhere(case.maps[me]):
            if kept(me, token, expert):
                expected[token, expert] = 100 * (expert // case.local) + places[expert // case.local][me, token, expert]
        assert same_bits(get(by_expert), expected)
        y, none = self.buffer.combine_with_unpermute(hidden=self.put(outputs), handle=handle)
        assert same_bits(get(y), sums(case, me, value, kept)) and none is None

    def check_plain(self, by="map", rng=None):
        """dispatch and combine, each again by the handle. Returns the handle."""
        case, me, get, buffer = self.case, self.me, self.get, self.buffer
        hidden, probs, factors, handle = buffer.dispatch(self.x, **self.routes(rng, by))
        tokens, node = case.tokens(me), case.same_node(me)
        assert same_bits(get(hidden), self.rows_of(tokens, case.hidden)) and factors is None
        expected = np.zeros((len(tokens), len(node) * case.local), np.float32)
        first = node.index(me) * case.local
        for row, (source, token) in enumerate(tokens):
            expected[row, first : first + case.local] = case.probs[source][token, case.mine(me)]
        assert same_bits(get(probs), expected)
        assert len(handle) == len(list(handle)) == 7 and get(handle[3]).tolist() == [len(tokens)]
        assert get(handle[4]).tolist() == [[bool(case.maps[s][t, e]) for e in case.mine(me)] for s, t in tokens]
        assert handle[5] == len(case.maps[me]) and handle[6].hidden_dim == HIDDEN

        places = [{row: place for place, row in enumerate(case.tokens(rank))} for rank in range(case.ranks)]
        there = [self.output(self.rows_of(case.tokens(rank), case.hidden)) for rank in range(case.ranks)]
        first_expert = {}  # each rank's row counts once

        def kept(source, token, expert):
            rank = expert // case.local
            return first_expert.setdefault((token, rank), expert) == expert

        def value(source, token, expert):
            return there[expert // case.local][places[expert // case.local][source, token]]

        y, by_expert = buffer.combine(self.put(there[me]), probs, handle)
        assert same_bits(get(y), sums(case, me, value, kept)) and same_bits(get(by_expert), case.probs[me])
        again, none, _, same = buffer.dispatch(self.x, handle=handle)
        assert same_bits(get(again), get(hidden)) and none is None and same is handle
        again, again_probs, *_ = buffer.dispatch(self.x, handle=handle, **self.routes(rng, by))
        assert same_bits(get(again), get(hidden)) and same_bits(get(again_probs), get(probs))
        y, none = buffer.combine(self.put(there[me]), handle=handle)
        assert same_bits(get(y), sums(case, me, value, kept)) and none is None
        return handle

    def check_fp8(self, values, factors, pad, by="map", rng=None):
        """fp8 rows with scaling factors, given by rank, both ways."""
        case, me, get, buffer = self.case, self.me, self.get, self.buffer
        routes = self.routes(rng, by)
        given = {"hidden": self.put(values[me]), "scaling_factor": self.put(factors[me])}
        hidden, _, scales, _ = buffer.dispatch(**given, **routes)
        tokens = case.tokens(me)
        assert same_bits(get(hidden), np.array([values[s][t] for s, t in tokens], values[0].dtype).reshape(-1, HIDDEN))
        assert same_bits(get(scales), np.array([factors[s][t] for s, t in tokens], np.float32).reshape(-1, HIDDEN // 128))
        hidden, _, scales, _, _ = buffer.dispatch_with_permute(**given, **routes, pad_multiple=pad, use_fp8=True)
        rows, _ = case.permuted(me, pad)
        zeros = np.zeros(HIDDEN, values[0].dtype), np.zeros(HIDDEN // 128, np.float32)
        expected = [zeros if r is None else (values[r[0]][r[1]], factors[r[0]][r[1]]) for r in rows]
        assert same_bits(get(hidden), np.array([v for v, _ in expected], values[0].dtype).reshape(-1, HIDDEN))
        assert same_bits(get(scales), np.array([f for _, f in expected], np.float32).reshape(-1, HIDDEN // 128))


def fp8_rows(rng, case, element=fp8):
    """(values, factors) by rank, any bits."""
    values = [rng.integers(0, 256, x.shape, np.uint8).view(element) for x in case.hidden]
    return values, [rng.random((len(x), HIDDEN // 128), np.float32) for x in case.hidden]


def buffer_of(group, case, most=MOST, **settings):
    return deep_ep.HybridEPBuffer(group, HIDDEN, most, case.local, **settings)
