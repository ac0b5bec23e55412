"""Placements with replicas, and ferry.balance."""

import copy
import os
import pathlib
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest

import ferry

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"
SEED = int(os.environ.get("FERRY_SEED", random.randrange(2**32)))
print(f"FERRY_SEED={SEED}")


def test_placements_with_replicas_are_values():
    placement = ferry.Placement.replicas([[2, 0], [], [1, 2], [2]], experts=3, version=4)
    assert (placement.experts, placement.ranks, placement.total_replicas, placement.version) == (3, 4, 5, 4)
    assert placement.has_replicas and placement.replicas_of(2) == [(0, 0), (2, 1), (3, 0)] and placement.experts_of(2) == [1, 2]
    again = pickle.loads(pickle.dumps(placement))
    assert again == copy.deepcopy(placement) == placement and hash(again) == hash(placement)
    assert repr(placement) == "Placement(3 experts on 4 ranks, 5 replicas, version 4)"
    single = ferry.Placement.replicas([[1], [2, 0]], 3)
    assert single == ferry.Placement.table([(1, 1), (0, 0), (1, 0)], 2) and not single.has_replicas


@pytest.mark.parametrize(("ranks", "experts", "pattern"), [
    ([[0, 2], [2]], 3, "no rank holds expert 1"),
    ([[0], [1, 0, 1]], 2, "rank 1 holds expert 1 twice, as its local experts 0 and 2"),
    ([[0], [2]], 2, "local expert 0 of rank 1 is expert 2, must be 0 to 1"),
])
def test_refused_replicas(ranks, experts, pattern):
    with pytest.raises(ferry.UsageError, match=pattern):
        ferry.Placement.replicas(ranks, experts)


def test_a_route_takes_the_replica_of_its_hash():
    placement = ferry.Placement.replicas([[0], [0], [0]], 1)

    def hash32(token, source, slot):
        x = (token * 0x9E3779B1 + source * 0x85EBCA77 + slot * 0xC2B2AE3D) % 2**32
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    for token, source, slot in np.random.default_rng(SEED).integers(0, 2**20, (200, 3)).tolist():
        assert placement.replica_of_route(0, token=token, source=source, slot=slot) == (hash32(token, source, slot) % 3, 0)
    with pytest.raises(ferry.UsageError, match="expert = 1"):
        placement.replica_of_route(1, token=0, source=0, slot=0)


def test_balance_evens_the_ranks_of_every_layer():
    trace = ferry.open_trace(f"synth:prefill:experts=64,tokens=2048,layers=2,seed={SEED}")
    loads = np.stack([trace.expert_counts(layer) for layer in range(2)])
    for dtype in [np.int64, np.float32]:
        placements = ferry.balance(loads.astype(dtype), 8, 9)
        for layer, placement in enumerate(placements):
            routes = trace.rank_counts(layer, placement)
            assert routes.max() < 1.05 * routes.mean()
            assert max(len(placement.experts_of(rank)) for rank in range(8)) <= 9
    assert ferry.balance(loads.tolist(), 8, 9) == ferry.balance(loads, 8, 9)
    again = ferry.balance(loads, 8, 9, earlier=ferry.balance(loads, 8, 9))
    assert [ferry.moved_experts(a, b) for a, b in zip(again, ferry.balance(loads, 8, 9), strict=True)] == [0, 0]


@pytest.mark.parametrize(("loads", "settings", "pattern"), [
    (np.ones(8), {}, r"loads: expected an array of shape \[layers, experts\], got \[8\]"),
    (np.ones((1, 8)), {"slots": 1}, "8 experts do not fit the 4 slots of 4 ranks: pass slots = 2 or more"),
    ([[1, 2, -3, 4]], {}, r"loads\[0, 2\] = -3, must be finite and 0 or more"),
    ([[1, 2], [3, float("nan")]], {}, r"loads\[1, 1\] = nan"),
    (np.ones((1, 8)), {"nodes": 3}, "nodes = 3, must be 1 or more, and divide ranks = 4"),
    (np.ones((1, 8)), {"earlier": [ferry.Placement.blocks(8, 2)]}, "earlier.0. is of 8 experts on 2 ranks"),
])
def test_refused_balance(loads, settings, pattern):
    with pytest.raises(ferry.UsageError, match=pattern):
        ferry.balance(loads, **({"ranks": 4, "slots": 3} | settings))


def test_an_exchange_sends_routes_to_their_replicas():
    trace = ferry.open_trace(f"synth:prefill:experts=16,top_k=4,tokens=96,layers=1,seed={SEED}")
    placement = ferry.balance([trace.expert_counts(0)], 4, 6)[0]
    held = [list(placement.experts_of(rank)) for rank in range(4)]
    for expert in (3, 5):  # replicas in any case
        for ranks in held:
            if expert not in ranks:
                ranks.append(expert)
    placement = ferry.Placement.replicas(held, 16)

    def body(rank):
        ids, weights = trace.partition(0, rank=rank.index, ranks=4, tokens_per_rank=24)
        exchange = ferry.Exchange(rank, experts=16, top_k=4, hidden=8, max_tokens=24, format="fp32", combine_type="fp32", reduction="exact",
                                  placement=placement)
        assert exchange.config.placement == placement
        tokens = np.random.default_rng(SEED + rank.index).standard_normal((24, 8), np.float32)
        rows = exchange.dispatch(tokens, ids, weights)
        assert rows.group_expert.tolist() == placement.experts_of(rank.index)
        layout = ferry.dispatch_layout(ids, placement, source=rank.index)
        assert rows.plan.counts.shape == (4, placement.total_replicas)
        assert np.array_equal(layout[1], rows.plan.counts[rank.index]) and np.array_equal(layout[0], rows.plan.tokens_between[rank.index])
        for token in range(24):
            for slot in range(4):
                expected = placement.replica_of_route(int(ids[token, slot]), token=token, source=rank.index, slot=slot)[0]
                assert rows.plan.destinations[token, slot] == expected
        combined = exchange.combine(rows.data, rows.plan, row_weights=rows.weight)
        return combined, tokens, weights, exchange.load_counts()

    results = ferry.Group.threads(4).run(body)
    for combined, tokens, weights, load in results:
        assert np.allclose(combined, tokens * weights.sum(1, keepdims=True), atol=1e-5)
        assert load.experts.tolist() == trace.expert_counts(0).tolist()
        assert load.ranks.tolist() == trace.rank_counts(0, placement, 24).tolist()


def test_sizes_on_device_memory_have_room_for_the_choice():
    settings = {"top_k": 3, "hidden": 8, "max_tokens": 50, "memory": "device", "lanes": 2}
    placement = ferry.Placement.replicas([[0, 1], [1]], 2)
    sizes = ferry.size_of(ferry.Config(experts=2, placement=placement, **settings), 2)
    inside = ferry.size_of(ferry.Config(experts=3, placement=ferry.Placement.table([(0, 0), (0, 1), (1, 0)], 2), **settings), 2)
    assert sizes.plans - inside.plans >= 2 * 8 * 3 * 50 and sizes.dispatch_staging == inside.dispatch_staging


def test_the_example_balances():
    done = subprocess.run([sys.executable, EXAMPLES / "balance.py"], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ((EXAMPLES / "balance.txt").read_text(), 0), done.stderr
