"""Low-latency mode of deep_ep between simulated nodes."""

import numpy as np
import pytest

import ferry
import ferry.deep_ep as deep_ep
from deep_ep_steps import HIDDEN, fp8, layout_and_dispatch, low_latency, step_of
from node_ranks import EVEN, OTHERS, TRANSPORTS, name_of
from oracle import bf16, messages_to, rank_of, routes_to, same_bits

MOST = 9
cases = pytest.mark.parametrize("case", EVEN + OTHERS, ids=name_of)
hooks = pytest.mark.parametrize("hook", [False, True])


def on_nodes(case, body, hidden=HIDDEN):
    transport, nodes = case
    room = deep_ep.Buffer.get_low_latency_rdma_size_hint(MOST, hidden, len(nodes), 4 * len(nodes))
    return TRANSPORTS[transport](nodes, lambda rank: body(
        rank.index, deep_ep.Buffer(rank, num_rdma_bytes=room, low_latency_mode=True, explicitly_destroy=True)))


def step_for(rng, case, **settings):
    return step_of(rng, len(case[1]), MOST, experts=4 * len(case[1]), **settings)


@cases
@hooks
def test_rows(rng, case, hook):
    step, ranks = step_for(rng, case), len(case[1])

    def body(me, buffer):
        stats = np.full(4, 100, np.int32)
        recv, counts, handle, _, call = low_latency(
            buffer, step, me, use_fp8=False, return_recv_hook=hook, cumulative_local_expert_recv_stats=stats)
        if hook:
            call()
        assert recv.shape == (4, ranks * MOST, HIDDEN) and stats.tolist() == (counts + 100).tolist()
        source, ranges, *sizes = handle
        assert sizes == [MOST, HIDDEN, 4 * ranks]
        for local in range(4):
            routes = [route for route in routes_to(step, me) if route[0] == me * 4 + local]
            assert counts[local] == len(routes)
            for position, (_, rank, token, _) in enumerate(routes):
                assert source[local, position] == token and same_bits(recv[local, position], step.tokens[rank][token])
            for rank in range(ranks):
                begin, count = int(ranges[local, rank]) >> 32, int(ranges[local, rank]) & 0xFFFFFFFF
                assert routes[begin : begin + count] == [r for r in routes if r[1] == rank]

    on_nodes(case, body)


@pytest.mark.parametrize("case", EVEN[:2], ids=name_of)
@pytest.mark.parametrize("scales", ["plain", "ue8m0"])
def test_fp8(rng, case, scales):
    step = step_for(rng, case, hidden=1024)

    def alone(me, buffer):  # rank `me` of one host
        return low_latency(buffer, step, me, **settings)[:2]

    settings = {} if scales == "plain" else {"round_scale": True, "use_ue8m0": True}
    expected = ferry.Group.threads(4).run(lambda rank: alone(rank.index, deep_ep.Buffer(rank)))

    def body(me, buffer):
        (values, scale), counts, *_ = low_latency(buffer, step, me, **settings)
        (same_values, same_scale), same_counts = expected[me]
        assert values.dtype == fp8 and counts.tolist() == same_counts.tolist()
        for local, count in enumerate(counts):
            assert same_bits(values[local, :count], same_values[local, :count])
            assert same_bits(scale[local, :count], same_scale[local, :count])

    on_nodes(case, body, 1024)


def fused(weight, value, total):
    """weight * value + total in fp32 with one rounding."""
    return (np.float64(weight) * value.astype(np.float64) + total.astype(np.float64)).astype(np.float32)


def sums(step, nodes, me, exact):
    """exact: over slots. Otherwise over the slots of a rank, then the ranks of a node, both rounded to bf16, then over nodes."""
    def value(token, expert):
        return (step.tokens[me][token] * bf16(1 + expert)).astype(np.float32)

    def rounded(total):
        return total.astype(bf16).astype(np.float32)

    result = np.zeros(step.tokens[me].shape, np.float32)
    for token, ids in enumerate(step.ids[me].tolist()):
        slots = [k for k, expert in enumerate(ids) if expert >= 0]
        if exact:
            for k in slots:
                result[token] = fused(step.weights[me][token, k], value(token, ids[k]), result[token])
            continue
        for node in range(1 + max(nodes)):
            ranks = sorted({rank_of(ids[k], step) for k in slots if nodes[rank_of(ids[k], step)] == node})
            of_node = np.zeros(HIDDEN, np.float32)
            for rank in ranks:
                of_rank = np.zeros(HIDDEN, np.float32)
                for k in slots:
                    if rank_of(ids[k], step) == rank:
                        of_rank = fused(step.weights[me][token, k], value(token, ids[k]), of_rank)
                of_node = of_node + rounded(of_rank)
            if ranks:
                result[token] = result[token] + rounded(of_node)
    return result.astype(bf16)


@cases
@hooks
@pytest.mark.parametrize("way", ["new", "out", "zero_copy"])
def test_combine(rng, case, hook, way):
    step, ranks = step_for(rng, case), len(case[1])

    def body(me, buffer):
        recv, counts, handle, *_ = low_latency(buffer, step, me, use_fp8=False)
        outputs = np.where(np.arange(ranks * MOST)[:, None] < counts[:, None, None], recv, bf16(0))
        for local in range(4):
            outputs[local] = outputs[local] * bf16(1 + me * 4 + local)
        settings = {"return_recv_hook": hook}
        if way == "out":
            settings["out"] = np.full(step.tokens[me].shape, np.nan, bf16)
        if way == "zero_copy":
            buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = outputs
            settings["zero_copy"] = True
        y, _, call = buffer.low_latency_combine(outputs, step.ids[me], step.weights[me], handle, **settings)
        if hook:
            call()
        assert way != "out" or y is settings["out"]
        assert same_bits(y, sums(step, case[1], me, exact=hook))

    on_nodes(case, body)


@pytest.mark.parametrize("case", EVEN[:2], ids=name_of)
def test_two_calls_with_pending_hooks(rng, case):
    first, second = step_for(rng, case), step_for(rng, case)

    def body(me, buffer):
        alone = [low_latency(buffer, step, me, use_fp8=False)[:2] for step in (first, second)]
        pending = [low_latency(buffer, step, me, use_fp8=False, return_recv_hook=True) for step in (first, second)]
        pending[1][4]()
        pending[0][4]()
        for result, (rows, counts) in zip(pending, alone):
            assert result[1].tolist() == counts.tolist()
            assert all(same_bits(result[0][local, :count], rows[local, :count]) for local, count in enumerate(counts))

    on_nodes(case, body)


def test_one_buffer_for_both_modes(rng):
    transport, nodes = case = EVEN[1]
    step = step_for(rng, case)

    def body(rank):
        me = rank.index
        buffer = deep_ep.Buffer(rank, int(2e9), int(1e9), low_latency_mode=True)
        for _ in range(2):
            rows = layout_and_dispatch(buffer, step, me)[0]
            assert len(rows) == len(messages_to(step, me))
            counts = low_latency(buffer, step, me, use_fp8=False)[1]
            assert counts.sum() == len(routes_to(step, me))

    TRANSPORTS[transport](nodes, body)
