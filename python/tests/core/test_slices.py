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


def exchange_for(rank, **settings):
    return ferry.Exchange(rank, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=MOST, format="fp32", combine_type="fp32",
                          **settings)


def test_slices_give_the_results_of_whole_experts():
    whole = ferry.Group.threads(EP).run(lambda rank: step(exchange_for(rank), rank.index, 1))
    placement = ferry.Placement.ep_tp(EXPERTS, EP, TP)
    sliced = ferry.Group.threads(EP * TP).run(
        lambda rank: step(exchange_for(rank, placement=placement), rank.index // TP, 1 / TP))
    for rank, (counts, rows, results) in enumerate(sliced):
        expected = whole[rank // TP]
        assert counts == expected[0]
        assert np.array_equal(rows, expected[1]) and np.array_equal(results, expected[2])


# Sums in bf16, so that the bits depend on which ranks form a node. Sub-groups lie on several nodes.
def test_nodes_are_those_of_the_ranks_that_add(rng):
    ep, experts, top_k, counts = 4, 8, 6, [5, 0, 4, 3]
    nodes = rng.integers(0, 3, ep * TP)
    tokens = [rng.standard_normal((count, HIDDEN)).astype(np.float32) for count in counts]
    ids = [np.array([rng.permutation(experts)[:top_k] for _ in range(count)], np.int64).reshape(count, top_k) for count in counts]

    def summed(rank, group, share, **settings):
        exchange = ferry.Exchange(rank, experts=experts, top_k=top_k, hidden=HIDDEN, max_tokens=MOST, format="fp32", combine_type="bf16",
                                  reduction_level="node", **settings)
        rows = exchange.dispatch(tokens[group], ids[group])
        outputs = rows.received_rows() * np.repeat(rows.group_expert + 1.3, rows.counts)[:, None].astype(np.float32) * np.float32(share)
        return exchange.combine(outputs, rows.plan, result=np.empty((counts[group], HIDDEN), np.float32))

    def group_of(chosen):
        first = {node: number for number, node in enumerate(dict.fromkeys(chosen))}
        return ferry.Group.threads(ferry.Topology([first[node] for node in chosen]))

    placement = ferry.Placement.ep_tp(experts, ep, TP)
    sliced = group_of(nodes).run(lambda rank: summed(rank, rank.index // TP, 1 / TP, placement=placement))
    for i in range(TP):
        whole = group_of(nodes[i::TP]).run(lambda rank: summed(rank, rank.index, 1))
        for group, count in enumerate(counts):
            slice_i = slice(i * count // TP, (i + 1) * count // TP)
            for rank in range(group * TP, group * TP + TP):
                assert np.array_equal(sliced[rank][slice_i], whole[group][slice_i])


def test_plans_are_those_before_the_gather():
    def body(rank):
        exchange = exchange_for(rank, placement=ferry.Placement.ep_tp(EXPERTS, EP, TP))
        _, ids, _ = step_inputs = inputs_of(rank.index // TP)
        plan = exchange.dispatch(*step_inputs).plan
        first, end = (i * len(ids) // TP for i in (rank.index % TP, rank.index % TP + 1))
        assert plan.tokens == end - first and plan.counts.shape == (EP * TP, EXPERTS * TP)
        assert np.array_equal(plan.destinations, ids[first:end] // (EXPERTS // EP) * TP + rank.index % TP)
        with pytest.raises(ferry.UnsupportedError, match=r"keep plan.copy\(\)"):
            exchange.plan_over(plan.storage)

    ferry.Group.threads(EP * TP).run(body)


# What a call of arrays of the right shapes passes, or does.
MISSING = {
    "residual": ("an epilogue", lambda e, x, ids, rows, outputs: e.combine(outputs, rows.plan, residual=np.ones_like(x))),
    "scale": ("an epilogue", lambda e, x, ids, rows, outputs: e.combine(outputs, rows.plan, scale=2)),
    "row_values": ("row_values", lambda e, x, ids, rows, outputs: e.combine(
        outputs, rows.plan, row_values=np.ones(len(outputs), np.float32))),
    "route_values": ("route_values", lambda e, x, ids, rows, outputs: e.route_values(np.ones(ids.shape, np.float32), rows.plan)),
    "return_values": ("return_values", lambda e, x, ids, rows, outputs: e.return_values(np.ones(len(outputs), np.float32), rows.plan)),
    "a dispatch by a plan": ("a dispatch by plan", lambda e, x, ids, rows, outputs: e.dispatch(x, rows.plan)),
    "dot_rows": ("dot_rows", lambda e, x, ids, rows, outputs: e.dispatch(x, ids, dot_rows=np.ones((e.capacity, HIDDEN), np.float32))),
    "combine_backward": ("a dispatch by plan", lambda e, x, ids, rows, outputs: e.combine_backward(
        x, rows.plan, np.ones(ids.shape, np.float32), outputs)),
    "input_scales": ("input_scales", lambda e, x, ids, rows, outputs: e.dispatch(
        x, ids, format="fp8", input_scales=np.ones(EXPERTS, np.float32))),
    "fewer rows": ("memory.rows", lambda e, x, ids, rows, outputs: e.dispatch(
        x, ids, memory=ferry.ReceiveBuffers(np.empty((40, HIDDEN), np.float32), rows=40))),
    "scales in columns": ("scales in columns", lambda e, x, ids, rows, outputs: e.dispatch(x, ids, format="fp8-columns")),
    "phases of dispatch": ("phases", lambda e, x, ids, rows, outputs: e.dispatch_send(x, ids)),
    "phases of combine": ("phases", lambda e, x, ids, rows, outputs: e.combine_send(outputs, rows.plan)),
    "dispatch_counts": ("dispatch_counts", lambda e, x, ids, rows, outputs: e.dispatch_counts(ids)),
}


@pytest.mark.parametrize("name", MISSING)
def test_calls_that_slices_do_not_have_are_refused_by_name(name):
    what, call = MISSING[name]

    def body(rank):
        exchange = exchange_for(rank, placement=ferry.Placement.ep_tp(EXPERTS, EP, TP))
        x, ids, weights = inputs_of(rank.index // TP)
        rows = exchange.dispatch(x, ids)
        outputs = rows.received_rows().copy()
        # Peers of a rank that has refused raise what it has.
        with pytest.raises((ferry.UnsupportedError, ferry.UsageError), match=f"experts in slices .* do not have .*{what}"):
            call(exchange, x, ids, rows, outputs)
        assert exchange.combine(outputs, rows.plan).shape == x.shape

    ferry.Group.threads(EP * TP).run(body)


def test_what_slices_do_not_have_is_refused_by_name():
    placement = ferry.Placement.ep_tp(EXPERTS, EP, TP)
    with pytest.raises(ferry.UnsupportedError, match="experts in slices .* rank_major"):
        ferry.Group.threads(EP * TP).run(lambda rank: exchange_for(rank, placement=placement, layout="rank_major"))
