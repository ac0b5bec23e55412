"""Experts in slices: rows and results of an exchange without slices, where a sub-group stands for one rank."""

import numpy as np
import pytest

import ferry

EXPERTS, TOP_K, HIDDEN, MOST, EP, TP = 6, 2, 16, 5, 2, 2
COUNTS = [5, 3]  # tokens of each sub-group


def inputs_of(group):
    random = np.random.default_rng(group)
    ids = np.stack([random.permutation(EXPERTS)[:TOP_K] for _ in range(COUNTS[group])])
    return random.integers(-8, 9, (COUNTS[group], HIDDEN)).astype(np.float32), ids, np.full(ids.shape, 0.5, np.float32)


def step(exchange, group, share):
    """Each slice gives `share` of its expert's output."""
    rows = exchange.dispatch(*inputs_of(group))
    outputs = rows.received_rows() * np.repeat(rows.group_expert + 1, rows.counts)[:, None].astype(np.float32) * np.float32(share)
    with pytest.raises(ferry.UsageError, match="outputs: expected .* rows? or more"):
        exchange.combine(outputs[1:], rows.plan)
    y = exchange.combine(outputs, rows.plan.copy(), row_weights=rows.weight)
    assert np.array_equal(y, exchange.combine(outputs, rows.plan, topk_weights=inputs_of(group)[2]))
    return rows.counts.tolist(), rows.received_rows().copy(), y


def exchange_for(rank, backend, **settings):
    return ferry.Exchange(rank, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=MOST, format="fp32", combine_type="fp32",
                          backend=backend, **settings)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_slices_give_the_results_of_whole_experts(backend):
    whole = ferry.Group.threads(EP).run(lambda rank: step(exchange_for(rank, backend), rank.index, 1))
    placement = ferry.Placement.ep_tp(EXPERTS, EP, TP)
    sliced = ferry.Group.threads(EP * TP).run(
        lambda rank: step(exchange_for(rank, backend, placement=placement), rank.index // TP, 1 / TP))
    for rank, (counts, rows, results) in enumerate(sliced):
        expected = whole[rank // TP]
        assert counts == expected[0]
        assert np.array_equal(rows, expected[1]) and np.array_equal(results, expected[2])


def test_plans_are_those_before_the_gather():
    def body(rank):
        exchange = exchange_for(rank, "cpu", placement=ferry.Placement.ep_tp(EXPERTS, EP, TP))
        _, ids, _ = step_inputs = inputs_of(rank.index // TP)
        plan = exchange.dispatch(*step_inputs).plan
        first, end = (i * len(ids) // TP for i in (rank.index % TP, rank.index % TP + 1))
        assert plan.tokens == end - first and plan.counts.shape == (EP * TP, EXPERTS * TP)
        assert np.array_equal(plan.destinations, ids[first:end] // (EXPERTS // EP) * TP + rank.index % TP)
        with pytest.raises(ferry.UnsupportedError, match=r"keep plan.copy\(\)"):
            exchange.plan_over(plan.storage)

    ferry.Group.threads(EP * TP).run(body)


def test_what_slices_do_not_have_is_refused_by_name():
    placement = ferry.Placement.ep_tp(EXPERTS, EP, TP)
    with pytest.raises(ferry.UnsupportedError, match="experts in slices .* rank_major"):
        ferry.Group.threads(EP * TP).run(lambda rank: exchange_for(rank, "cpu", placement=placement, layout="rank_major"))
