"""Random cases of the calls of other systems: groups, placements, ids and values.

FERRY_CASES multiplies the number of cases. A case prints its seed: FERRY_SEED=<seed> FERRY_CASES=0 repeats it alone.
"""

import os

import numpy as np

import ferry
from format_loops import TYPES

F = np.float32
CASES = int(os.environ.get("FERRY_CASES", "1"))
ROUNDS = 6


def each_case(rng, kinds):
    """(kind, generator of random numbers) of each case: ROUNDS of all kinds."""
    seeds = [int(os.environ["FERRY_SEED"])] if CASES == 0 else [
        int(rng.integers(1 << 24)) * kinds + kind for _ in range(ROUNDS * CASES) for kind in range(kinds)]
    for seed in seeds:
        print(f"FERRY_SEED={seed} FERRY_CASES=0")
        yield seed % kinds, np.random.default_rng(seed)


def one_of(draw, *values):
    return values[int(draw.integers(len(values)))]


def fma(a, b, c):
    return (a.astype(np.float64) * np.float64(b) + c.astype(np.float64)).astype(F)


def numbers(draw, shape, dtype):
    """Values of different magnitudes, some of them zeros of both signs."""
    values = draw.standard_normal(shape) * 2.0 ** draw.integers(-6, 6, (*shape[:-1], 1) if shape else ())
    return np.where(draw.random(shape) < 0.05, np.copysign(0, values), values).astype(dtype)


class Ranks:
    """R ranks on one or two nodes, E experts on random ranks, and the tokens of a step."""

    def __init__(self, draw, *, repeats, same=False, ranks=None):
        self.ranks = ranks or int(draw.integers(1, 5))
        self.nodes = one_of(draw, 1, 1, 2) if self.ranks % 2 == 0 else 1
        self.experts, self.top_k = int(draw.integers(1, 12)), int(draw.integers(1, 5))
        if not repeats:
            self.top_k = min(self.top_k, self.experts)
        self.owner = draw.integers(0, self.ranks, self.experts)
        self.most = int(draw.integers(1, 10))
        self.counts = [int(draw.integers(0, self.most + 1)) for _ in range(self.ranks)]
        if same:
            self.counts = self.counts[:1] * self.ranks
        self.ids = []
        for count in self.counts:
            ids = draw.integers(0, self.experts, (count, self.top_k)) if repeats else np.array(
                [draw.permutation(self.experts)[: self.top_k] for _ in range(count)], np.int64).reshape(count, self.top_k)
            ids[draw.random(ids.shape) < 0.2] = -1
            self.ids.append(ids.astype(one_of(draw, np.int32, np.int64)))
        if same:
            self.ids = self.ids[:1] * self.ranks

    def where(self, draw):
        """Settings of how rows travel."""
        if self.nodes == 1:
            return one_of(draw, {}, {"backend": "cpu"}, {"memory": "host"})
        return one_of(draw, {}, {"hops": "one"}, {"hops": "two"}, {"hops": "two", "window": int(draw.integers(1, 5))})

    @property
    def placement(self):
        return ferry.Placement.table([(int(rank), int((self.owner[:expert] == rank).sum())) for expert, rank in enumerate(self.owner)], self.ranks)

    def experts_of(self, rank):
        return [expert for expert in range(self.experts) if self.owner[expert] == rank]

    def run(self, body):
        ferry.Group.threads(self.ranks, self.nodes).run(body)
