"""Capacities with drop policies: the kept routes are those of a loop over sorted lists; blocks have fixed shapes; gradients."""

import copy
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ferry
import ferry.torch
from oracle import random_ids

HIDDEN, MOST = 16, 9


@pytest.fixture(autouse=True)
def seeded(rng):
    torch.manual_seed(int(rng.integers(1 << 30)))
    torch.set_num_threads(1)


class Step:
    """Inputs of all ranks. Weights are multiples of 1/4, so that many are equal."""

    def __init__(self, rng, ranks, experts, top_k, ids=np.int64):
        self.experts, self.top_k, self.ranks = experts, top_k, ranks
        counts = [int(rng.integers(0, MOST + 1)) for _ in range(ranks)]
        counts[int(rng.integers(ranks))] = MOST
        self.x = [torch.tensor(rng.integers(-8, 9, (n, HIDDEN)), dtype=torch.float32) for n in counts]
        self.ids = [torch.tensor(random_ids(rng, n, experts, top_k).astype(ids)) for n in counts]
        for given in self.ids:  # some experts have most of the routes, some tokens list one twice
            busy = torch.tensor(rng.random(given.shape) < 0.4)
            given[busy & (given >= 0)] = int(rng.integers(experts))
        self.weights = [torch.tensor(rng.integers(0, 9, (n, top_k)) / 4, dtype=torch.float32) for n in counts]

    def exchange(self, rank, capacity, **settings):
        return ferry.Exchange(rank, **({"experts": self.experts, "top_k": self.top_k, "hidden": HIDDEN, "max_tokens": MOST, "format": "fp32",
                                        "combine_type": "fp32", "layout": "expert_padded", "capacity": capacity} | settings))

    def kept(self, capacity, policy, ranks=None):
        """The ids of each rank after the policy. `ranks`: whose routes share an expert's capacity; default: all."""
        after = [torch.full_like(ids, -1) for ids in self.ids]
        for expert in range(self.experts):
            routes = [(rank, token, slot) for rank in (ranks or range(self.ranks)) for token, slot in np.argwhere(self.ids[rank].numpy() == expert)]
            if policy == "probs":
                routes.sort(key=lambda route: -float(self.weights[route[0]][route[1], route[2]]))  # stable
            for rank, token, slot in routes[:capacity]:
                after[rank][token, slot] = expert
        return after


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize(("ranks", "experts", "top_k"), [(1, 4, 2), (2, 4, 3), (3, 7, 2), (4, 8, 1), (8, 16, 5)])
def test_an_exchange_keeps_what_the_policy_says(rng, policy, ranks, experts, top_k):
    step = Step(rng, ranks, experts, top_k, ids=[np.int32, np.int64][int(rng.integers(2))])
    capacity = int(rng.integers(1, 6))
    expected = step.kept(capacity, policy)

    def body(rank):
        me = rank.index
        exchange = step.exchange(rank, capacity)
        for used in (exchange, ferry.torch.handle_of(exchange)):
            weights = step.weights[me].clone().requires_grad_()
            before = step.ids[me].clone()
            ids = ferry.torch.drop_routes(before, weights, drop_policy=policy, exchange=used)
            assert torch.equal(ids, expected[me]) and ids.dtype == before.dtype and torch.equal(before, step.ids[me])
            # No route is dropped by the exchange: that would be an OverflowError.
            rows = ferry.torch.dispatch(used, step.x[me].clone().requires_grad_(), ids, weights)
            groups = exchange.config.placement.experts_of(me)
            assert rows.data.shape == (len(groups), capacity, HIDDEN) and not rows.data.isnan().any()
            for group, expert in enumerate(groups):
                kept = [(r, t) for r in range(ranks) for t, _ in np.argwhere(expected[r].numpy() == expert)]
                assert int(rows.counts[group]) == len(kept) <= capacity
                for row, (r, t) in enumerate(kept):
                    assert torch.equal(rows.data[group, row], step.x[r][t])
                assert not rows.data[group, len(kept):].any()
                assert not rows.weight.view(len(groups), capacity)[group, len(kept):].any()

    ferry.Group.threads(ranks).run(body)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_dropped_slots_add_nothing_and_have_no_gradient(rng, policy):
    step = Step(rng, 3, 6, 3)
    capacity = 3
    expected = step.kept(capacity, policy)

    def body(rank):
        me = rank.index
        exchange = step.exchange(rank, capacity, reduction="exact")
        x, weights = step.x[me].clone().requires_grad_(), step.weights[me].clone().requires_grad_()
        ids = ferry.torch.drop_routes(step.ids[me], weights, drop_policy=policy, exchange=exchange)
        rows = ferry.torch.dispatch(exchange, x, ids, weights)
        factor = rows.group_expert[:, None, None] + 2.0
        y = ferry.torch.combine(exchange, rows.data * factor, rows, row_weights=rows.weight)
        slope = torch.tensor(np.random.default_rng(me).integers(-3, 4, y.shape), dtype=torch.float32)
        d_x, d_weights = torch.autograd.grad(y, (x, weights), slope)
        for token in range(len(x)):
            sums, slopes = torch.zeros(HIDDEN), torch.zeros(HIDDEN)
            for slot in range(step.top_k):
                expert = int(expected[me][token, slot])
                gradient = 0.0 if expert < 0 else float((slope[token] * step.x[me][token]).sum()) * (expert + 2)
                assert float(d_weights[token, slot]) == gradient
                if expert >= 0:  # small integers and quarters: every sum is exact
                    sums += step.weights[me][token, slot] * (expert + 2) * step.x[me][token]
                    slopes += step.weights[me][token, slot] * (expert + 2) * slope[token]
            assert torch.equal(y[token], sums) and torch.equal(d_x[token], slopes)

    ferry.Group.threads(3).run(body)


def test_position_is_what_the_exchange_itself_drops(rng):
    step = Step(rng, 4, 8, 2)

    def body(rank):
        me = rank.index
        exchange = step.exchange(rank, 2, check_calls=False)
        ids = ferry.torch.drop_routes(step.ids[me], drop_policy="position", exchange=exchange)
        plain = ferry.torch.dispatch(exchange, step.x[me], step.ids[me], step.weights[me])
        rows = ferry.torch.dispatch(exchange, step.x[me], ids, step.weights[me])
        for name in ("data", "weight", "counts", "row_offsets"):
            assert torch.equal(getattr(rows, name), getattr(plain, name))
        combined = [ferry.torch.combine(exchange, each.data, each, row_weights=each.weight) for each in (plain, rows)]
        assert torch.equal(*combined)

    ferry.Group.threads(4).run(body)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_a_rank_alone_keeps_what_the_policy_says(rng, policy):
    step = Step(rng, 2, 5, 3)
    for capacity in (1, 2, 4, 100):
        for rank in range(2):
            ids = ferry.torch.drop_routes(step.ids[rank], step.weights[rank], drop_policy=policy, capacity=capacity)
            assert torch.equal(ids, step.kept(capacity, policy, [rank])[rank])


def test_capacity_is_that_of_megatron():
    assert ferry.torch.get_capacity(128 * 8, 256, 1.0) == 4 and ferry.torch.get_capacity(128 * 8, 256, 1.25) == 5
    assert ferry.torch.get_capacity(100 * 2, 64, 1.1) == math.ceil(200 / 64 * 1.1) == 4
    assert ferry.torch.get_capacity(3, 64, 1.0, min_capacity=2) == 2 and ferry.torch.get_capacity(3, 64, 1.0) == 1


def test_bad_ids_are_reported_by_the_dispatch(rng):
    step = Step(rng, 2, 4, 2)

    def body(rank):
        me = rank.index
        exchange = step.exchange(rank, 1)
        given = step.ids[me].clone()
        if len(given):
            given[-1, -1] = 9
        for policy in ("probs", "position"):
            ids = ferry.torch.drop_routes(given, step.weights[me], drop_policy=policy, exchange=exchange)
            if len(given):
                assert ids[-1, -1] == 9
                with pytest.raises(ferry.BadIdError, match="id 9"):
                    ferry.torch.dispatch(exchange, step.x[me], ids, step.weights[me])
            else:
                ferry.torch.dispatch(exchange, step.x[me], ids, step.weights[me])

    ferry.Group.threads(2).run(body)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_a_layer_with_a_capacity_factor(rng, policy):
    """Its result is that of a loop over the routes that each rank keeps, and its blocks have R * C rows."""
    experts, top_k, ranks = 4, 2, 2
    x = [torch.randn(n, HIDDEN) for n in (MOST, 4)]

    def body(rank):
        settings = {"experts": experts, "top_k": top_k, "hidden": HIDDEN, "ffn": 8, "max_tokens": MOST}
        torch.manual_seed(7)
        layer = ferry.torch.MoE(rank, **settings, capacity_factor=0.5, drop_policy=policy)
        assert layer.kept == 3 and layer.exchange.capacity == ranks * 3  # ceil(9 * 2 / 4 * 0.5)
        with torch.no_grad():
            y = layer(x[rank.index])
            scores = layer.router(x[rank.index]).softmax(-1)
            weights, ids = scores.topk(top_k)
            weights = weights / weights.sum(-1, keepdim=True)
            kept = ids.clone()
            for expert in range(experts):
                routes = [tuple(route) for route in np.argwhere(ids.numpy() == expert)]
                if policy == "probs":
                    routes.sort(key=lambda route: -float(weights[route]))
                for route in routes[3:]:
                    kept[route] = -1
            assert (kept != ids).any() or len(ids) < MOST
            parts = rank.all_gather(torch.stack((layer.w_in.reshape(2, -1), layer.w_out.reshape(2, -1))).numpy().tobytes())
            matrices = torch.cat([torch.frombuffer(bytearray(part), dtype=torch.float32).view(2, 2, -1) for part in parts], 1)
            expected = torch.zeros_like(y)
            for token, slot in np.argwhere(kept.numpy() >= 0):
                w_in, w_out = (matrices[i, kept[token, slot]] for i in range(2))
                hidden = torch.nn.functional.silu(x[rank.index][token] @ w_in.view(HIDDEN, 8))
                expected[token] += weights[token, slot] * (hidden @ w_out.view(8, HIDDEN))
        assert torch.allclose(y, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(copy.deepcopy(layer)(x[rank.index]), layer(x[rank.index]))

    ferry.Group.threads(ranks).run(body)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_in_compiled_code(rng, policy):
    step = Step(rng, 1, 4, 2)
    exchange = step.exchange(ferry.Group.custom(0, 1, lambda mine: [mine], lambda: None).join(), 2)
    handle = ferry.torch.handle_of(exchange)
    by = step.weights[0] if policy == "probs" else None
    torch.library.opcheck(torch.ops.ferry.drop_routes.default, (step.ids[0], by, handle, 0))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def kept_of(ids, weights):
        alone = ferry.torch.drop_routes(ids, weights, drop_policy=policy, capacity=1)
        return ferry.torch.drop_routes(ids, weights, drop_policy=policy, exchange=handle), alone

    found, alone = kept_of(step.ids[0], step.weights[0])
    assert torch.equal(found, step.kept(2, policy)[0]) and torch.equal(alone, step.kept(1, policy)[0])


def test_refusals(rng):
    ids, weights = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)

    def body(rank):
        step = Step(np.random.default_rng(0), 2, 4, 2)
        exchange = step.exchange(rank, 2)
        for given, pattern in [
            ({"drop_policy": "prob", "exchange": exchange}, "drop_policy: 'prob' is not one of probs, position"),
            ({"weights": None, "exchange": exchange}, "weights: drop_policy 'probs' needs them"),
            ({"capacity": 4, "exchange": exchange}, "capacity: 4, but an exchange has its own"),
            ({"ids": ids[:, :1], "exchange": exchange}, r"ids: expected int32 or int64 of at most 9 tokens and 2 slots, got torch.int64 \[3, 1\]"),
            ({"weights": weights[:2], "exchange": exchange}, r"weights: expected float32 \[3, 2\], got torch.float32 \[2, 2\]"),
        ]:
            with pytest.raises(ferry.UsageError, match=pattern):
                ferry.torch.drop_routes(**({"ids": ids, "weights": weights} | given if rank.index == 1 else {"ids": ids, "weights": weights, "exchange": exchange}))
            assert ferry.torch.drop_routes(ids, weights, exchange=exchange).shape == ids.shape
        major = step.exchange(rank, 0, layout="expert_major")
        with pytest.raises(ferry.UsageError, match="needs an exchange with layout 'expert_padded'"):
            ferry.torch.drop_routes(ids, weights, exchange=major)
        for settings, pattern in [({"drop_policy": "x"}, "drop_policy: 'x' is not one of probs, position"),
                                  ({"capacity_factor": 1.0, "capacity": 3}, "capacity_factor: 1.0 with capacity 3"),
                                  ({"capacity_factor": 0.0}, "must be positive")]:
            with pytest.raises(ferry.UsageError, match=pattern):
                ferry.torch.MoE(rank, experts=4, top_k=2, hidden=16, ffn=8, max_tokens=4, **settings)

    ferry.Group.threads(2).run(body)
    for capacity in None, 0:
        with pytest.raises(ferry.UsageError, match="must be the rows that an expert keeps"):
            ferry.torch.drop_routes(ids, weights, capacity=capacity)
