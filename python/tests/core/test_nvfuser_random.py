"""nvFuser's and Megatron's calls against loops written from docs/guides/nvfuser.md and docs/guides/megatron.md."""

import numpy as np

import ferry
import ferry.megatron
from format_loops import TYPES
from nvfuser_case import NvfuserCase
from random_cases import F, each_case, numbers, one_of


def test_nvfusers_calls_agree_with_loops(rng):
    for kind, draw in each_case(rng, 30):
        case = NvfuserCase(draw, list(TYPES)[kind % 3])
        case.step.run(lambda rank: case.check(rank, rank.index))


def test_megatrons_calls_agree_with_loops(rng):
    for _, draw in each_case(rng, 20):
        ranks, hidden = int(draw.integers(1, 5)), 8 * int(draw.integers(1, 9))
        counts = [int(draw.integers(0, 9)) for _ in range(ranks)]
        total, kind = sum(counts), one_of(draw, *TYPES)
        shape = one_of(draw, (), (3,), (2, 5))
        gathered = [numbers(draw, (count, *shape), np.int64) for count in counts]
        kept = [numbers(draw, (total, hidden), TYPES[kind]) for _ in range(ranks)]
        in_array = bool(draw.random() < 0.5)

        def body(rank):
            me, count = rank.index, counts[rank.index]
            exchange = ferry.Exchange(rank, experts=ranks, top_k=1, hidden=hidden, max_tokens=8)
            step = np.full(3, -7, np.int32)
            ferry.megatron.fused_metadata_update(np.array([count], np.int32) if in_array else count, None, exchange, step)
            assert step.tolist() == [total, sum(counts[:me]), max(counts)]
            out = np.full((total + 1, *shape), -7, np.int64)
            assert exchange.all_gather_v(gathered[me], out).tobytes() == np.concatenate(gathered).tobytes()
            assert (out[total:] == -7).all()
            sums = np.zeros((total, hidden), F)
            for rows in kept:
                sums += rows.astype(F)
            first = sum(counts[:me])
            y = exchange.reduce_scatter_v(kept[me], np.full((count, hidden), 7, TYPES[kind]))
            assert y.tobytes() == sums[first : first + count].astype(TYPES[kind]).tobytes()

        ferry.Group.threads(ranks).run(body)
