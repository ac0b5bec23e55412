"""The deep_ep interface with NumPy on the CPU backend: shapes, types, order and conventions of every method."""

import numpy as np
import pytest

import ferry
import ferry.deep_ep as deep_ep
from called_functions import python_functions_of
from deep_ep_steps import HIDDEN, fp8, layout_and_dispatch, low_latency, on_ranks, step_of
from oracle import bf16, rank_of, routes_to, messages_to, same_bits


def test_layout(rng):
    step = step_of(rng)

    @on_ranks(4)
    def _(me, buffer):
        ids = step.ids[me]
        per_rank, per_rdma, per_expert, in_rank, event = buffer.get_dispatch_layout(ids, step.experts)
        in_rank_expected = [[any(i >= 0 and rank_of(i, step) == r for i in row) for r in range(4)] for row in ids.tolist()]
        assert in_rank.dtype == np.bool_ and np.array_equal(in_rank, np.array(in_rank_expected, bool).reshape(len(ids), 4))
        assert per_rdma is None and per_rank.dtype == per_expert.dtype == np.int32
        assert per_rank.tolist() == in_rank.sum(0).tolist()
        assert per_expert.tolist() == [int((ids == e).sum()) for e in range(step.experts)]
        assert isinstance(event, deep_ep.EventOverlap)


def test_dispatch_layout_by_nodes(rng):
    ids = np.array([[0, 1], [2, -1], [3, 0], [1, 2], [9, -1]])
    placement = ferry.Placement.blocks(4, 4)
    nodes = ferry.Topology([5, 0, 5, 5])
    assert [nodes.ranks_of(n) for n in range(nodes.nodes)] == [[0, 2, 3], [1]]
    assert ferry.dispatch_layout(ids, placement, topology=nodes)[3].tolist() == [4, 2]
    assert ferry.dispatch_layout(ids, placement)[3] is None
    with pytest.raises(ferry.UsageError, match="the topology has 3 ranks, and the placement 4"):
        ferry.dispatch_layout(ids, placement, topology=ferry.Topology([0, 0, 1]))
    with pytest.raises(ferry.UsageError, match="node_of_rank is empty"):
        ferry.Topology([])


@pytest.mark.parametrize("ids", [np.int32, np.int64])
@pytest.mark.parametrize("alignment", [1, 8])
def test_rows_of_normal_mode(rng, ids, alignment):
    step = step_of(rng, ids=ids)

    @on_ranks(4)
    def _(me, buffer):
        recv_x, recv_idx, recv_weights, counts, handle, event = layout_and_dispatch(
            buffer, step, me, expert_alignment=alignment)
        expected = messages_to(step, me)
        first = me * 4
        assert recv_x.shape == (len(expected), HIDDEN) and recv_x.dtype == bf16
        assert recv_idx.dtype == ids and recv_weights.dtype == np.float32
        for row, (source, token) in enumerate(expected):
            assert same_bits(recv_x[row], step.tokens[source][token])
            here = [i >= 0 and rank_of(i, step) == me for i in step.ids[source][token].tolist()]
            assert recv_idx[row].tolist() == np.where(here, step.ids[source][token] - first, -1).tolist()
            assert same_bits(recv_weights[row], np.where(here, step.weights[source][token], np.float32(0)))
        pairs = [sum(route[0] == first + e for route in routes_to(step, me)) for e in range(4)]
        assert counts == [-(-n // alignment) * alignment for n in pairs] and all(type(n) is int for n in counts)

        rank_prefix = handle[0]
        by_source = [[sum(s <= i for s, _ in messages_to(step, j)) for j in range(4)] for i in range(4)]
        assert rank_prefix.dtype == np.int32 and rank_prefix.tolist() == by_source
        assert handle[3].tolist() == [token for _, token in expected] and handle[3].dtype == np.int32
        assert len(handle) == 6 and len(list(handle)) == 6


def test_the_rest_of_a_handle(rng):
    step = step_of(rng, most=45)

    @on_ranks(2)
    def _(me, buffer):
        if me < 2:
            two = type(step)(step.experts, step.top_k, step.tokens[:2], step.ids[:2], step.weights[:2])
            *_, handle, _ = layout_and_dispatch(buffer, two, me)
            _, channel, recv_channel, source, in_rank, head = handle
            tokens = len(two.tokens[me])
            block = max(1, -(-tokens // 10))
            for rank in range(2):
                mine = [token for token in range(tokens) if in_rank[token, rank]]
                assert channel[rank].tolist() == [sum(t < (c + 1) * block for t in mine) for c in range(10)]
                before = [sum(u < t and u // block == t // block for u in mine) for t in mine]
                assert [head[t, rank] for t in mine] == before
                assert all(head[t, rank] == -1 for t in range(tokens) if t not in mine)
                theirs = [t for s, t in messages_to(two, me) if s == rank]
                block_of = max(1, -(-len(two.tokens[rank]) // 10))
                assert recv_channel[rank].tolist() == [sum(t < c * block_of for t in theirs) for c in range(10)]


def test_quantised_rows_are_moved_unchanged(rng):
    step = step_of(rng)
    # Scales in columns, as callers often have them; three a row, so that a row is not a multiple of 16 bytes.
    rows = [(rng.integers(0, 255, (len(x), HIDDEN)).astype(np.uint8).view(fp8), np.asfortranarray(rng.random((len(x), 3), np.float32)))
            for x in step.tokens]

    @on_ranks(4)
    def _(me, buffer):
        (values, scales), *_, handle, _ = layout_and_dispatch(buffer, step, me, x=rows[me])
        assert values.dtype == fp8 and scales.dtype == np.float32 and scales.flags.c_contiguous
        for row, (source, token) in enumerate(messages_to(step, me)):
            assert same_bits(values[row], rows[source][0][token]) and same_bits(scales[row], rows[source][1][token])
        assert scales.shape == (len(messages_to(step, me)), 3)
        again = buffer.dispatch(rows[me], handle=handle)
        assert same_bits(again[0][0], values) and same_bits(again[0][1], scales)


def test_a_handle_is_reused(rng):
    step = step_of(rng)

    @on_ranks(4)
    def _(me, buffer):
        recv_x, *_, handle, _ = layout_and_dispatch(buffer, step, me)
        layout_and_dispatch(buffer, step, me, x=(step.tokens[me] * 2).astype(bf16))  # another call in between
        cached = buffer.dispatch(step.tokens[me], handle=handle, config=deep_ep.Config(24, 8, 256))
        assert len(cached) == 6 and cached[1:5] == (None, None, None, None)
        assert same_bits(cached[0], recv_x)
        with pytest.raises(ferry.UsageError, match="handle excludes"):
            buffer.dispatch(step.tokens[me], handle=handle, topk_idx=step.ids[me])


def test_worst_case_rows(rng):
    step = step_of(rng)

    @on_ranks(4)
    def _(me, buffer):
        recv_x, recv_idx, recv_weights, counts, *_ = layout_and_dispatch(buffer, step, me)
        for worst in (4 * 9, 2000):
            worst_x, worst_idx, worst_weights, none, handle, _ = layout_and_dispatch(buffer, step, me, num_worst_tokens=worst)
            assert none == [] and worst_x.shape == (worst, HIDDEN) and worst_weights.shape == worst_idx.shape == (worst, 3)
            n = len(recv_x)
            assert same_bits(worst_x[:n], recv_x) and same_bits(worst_idx[:n], recv_idx)
            assert same_bits(worst_weights[:n], recv_weights) and (worst_idx[n:] == -1).all()
            again = buffer.dispatch(step.tokens[me], handle=handle)[0]
            assert again.shape == worst_x.shape and same_bits(again[:n], recv_x)
            assert same_bits(buffer.combine(worst_x, handle)[0], buffer.combine(again, handle)[0])
        most = max(len(messages_to(step, rank)) for rank in range(4))
        with pytest.raises(ferry.OverflowError, match=rf"num_worst_tokens = {most - 1}, but rank \d is sent {most} rows"):
            layout_and_dispatch(buffer, step, me, num_worst_tokens=most - 1)
        assert same_bits(layout_and_dispatch(buffer, step, me)[0], recv_x)


def test_dispatch_without_ids(rng):
    step = step_of(rng)

    @on_ranks(4)
    def _(me, buffer):
        recv_x, recv_idx, recv_weights, counts, handle, _ = layout_and_dispatch(
            buffer, step, me, topk_idx=None, topk_weights=None, expert_alignment=2)
        assert recv_idx is None and recv_weights is None
        pairs = [sum(route[0] == me * 4 + e for route in routes_to(step, me)) for e in range(4)]
        assert counts == [-(-n // 2) * 2 for n in pairs]
        assert handle[3].tolist() == [token for _, token in messages_to(step, me)]
        for row, (source, token) in enumerate(messages_to(step, me)):
            assert same_bits(recv_x[row], step.tokens[source][token])
        y, none, _ = buffer.combine(recv_x, handle)
        assert none is None and y.shape == step.tokens[me].shape


@pytest.mark.parametrize("biases", [0, 1, 2])
def test_combine_adds_ranks_without_weights(rng, biases):
    step = step_of(rng)

    @on_ranks(4)
    def _(me, buffer):
        recv_x, _, recv_weights, _, handle, _ = layout_and_dispatch(buffer, step, me)
        bias = [rng.standard_normal(step.tokens[me].shape).astype(bf16) for _ in range(biases)]
        given = None if not biases else bias[0] if biases == 1 else tuple(bias)
        y, weights, event = buffer.combine(recv_x, handle, topk_weights=recv_weights, bias=given)
        fan_out = np.array([sum((me, t) in messages_to(step, r) for r in range(4)) for t in range(len(y))], np.float32)
        expected = step.tokens[me].astype(np.float32) * fan_out.reshape(-1, 1) + np.float32(0)  # turns -0 into 0
        for term in bias:
            expected = expected + term.astype(np.float32)
        assert y.dtype == bf16 and same_bits(y, expected.astype(bf16))
        assert weights.dtype == np.float32
        assert same_bits(weights, np.where(step.ids[me] >= 0, step.weights[me], np.float32(0)))
        assert isinstance(event, deep_ep.EventOverlap)


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
def test_physical_experts(rng, mode):
    """Engines with redundant experts choose replicas themselves and number them rank by rank."""
    held = [[0, 1, 2, 3], [0, 4, 5, 6], [7, 0, 8, 9], [1, 10, 11, 2]]
    placement = ferry.Placement.replicas(held, 12)
    logical = step_of(rng, experts=12)
    tokens = [rng.integers(-2, 3, x.shape).astype(bf16) for x in logical.tokens]
    physical = [ids.copy() for ids in logical.ids]
    for source, token, slot in [(s, *at) for s in range(4) for at in np.argwhere(logical.ids[s] >= 0).tolist()]:
        rank, local = placement.replica_of_route(int(logical.ids[source][token, slot]), token=token, source=source, slot=slot)
        physical[source][token, slot] = 4 * rank + local
    step = type(logical)(16, 3, tokens, physical, [np.ones_like(w) for w in logical.weights])
    factors = np.array(held, np.float32) + 1  # of the experts of each rank

    @on_ranks(4)
    def _(me, buffer):
        if mode == "normal":
            x, ids, _, _, handle, _ = layout_and_dispatch(buffer, step, me)
            factor = np.where(ids >= 0, factors[me][np.maximum(ids, 0)], 0).sum(1, keepdims=True)
            y, *_ = buffer.combine((x.astype(np.float32) * factor).astype(bf16), handle)
        else:
            x, counts, handle, *_ = low_latency(buffer, step, me, use_fp8=False)
            outputs = np.where(np.arange(36)[:, None] < counts[:, None, None], x, bf16(0)).astype(np.float32) * factors[me][:, None, None]
            y, *_ = buffer.low_latency_combine(outputs.astype(bf16), step.ids[me], step.weights[me], handle)
        factor = np.where(logical.ids[me] >= 0, logical.ids[me] + 1, 0).sum(1, keepdims=True)
        assert np.array_equal(y.astype(np.float32), tokens[me].astype(np.float32) * factor)


@pytest.mark.filterwarnings("error")
def test_biases_that_are_no_numbers_or_infinite(rng):
    step = step_of(rng)
    kinds = np.array([0xFFC1, 0x7FBF, 0x7F80, 0xFF80], np.uint16).view(bf16)  # two NaN with payloads, and infinities

    @on_ranks(4)
    def _(me, buffer):
        recv_x, _, _, _, handle, _ = layout_and_dispatch(buffer, step, me)
        bias = np.zeros(step.tokens[me].shape, bf16)
        bias[:, :4] = kinds
        bias[:, 4] = kinds[2]
        other = np.zeros_like(bias)
        other[:, 4] = kinds[3]
        y, _, _ = buffer.combine(recv_x, handle, bias=(bias, other))
        assert (y.view(np.uint16)[:, :5] == [0x7FFF, 0x7FFF, 0x7F80, 0xFF80, 0x7FFF]).all()
        assert not np.isnan(y[:, 5:].astype(np.float32)).any()


def test_more_tokens_than_before(rng):
    small, large = step_of(rng, most=3), step_of(rng, most=600)

    @on_ranks(4)
    def _(me, buffer):
        first_x, *_, first, _ = layout_and_dispatch(buffer, small, me)
        large_x, *_, second, _ = layout_and_dispatch(buffer, large, me)
        assert len(large_x) == len(messages_to(large, me))
        again = buffer.dispatch(small.tokens[me], handle=first)[0]
        assert same_bits(again, first_x)  # an old handle still works
        assert buffer.combine(large_x, second)[0].shape == large.tokens[me].shape


def test_calls_run_in_compiled_code(rng):
    step = step_of(rng, 1)

    @on_ranks(1)
    def _(me, buffer):
        rows, *_, handle, _ = layout_and_dispatch(buffer, step, me)
        layout = buffer.get_dispatch_layout(step.ids[me], 16)
        new_routes = {"topk_idx": step.ids[me], "topk_weights": step.weights[me], "num_tokens_per_rank": layout[0],
                      "num_tokens_per_expert": layout[2], "is_token_in_rank": layout[3], "config": deep_ep.Config()}
        for name, call in {
            "get_dispatch_layout": lambda: buffer.get_dispatch_layout(step.ids[me], 16),
            "dispatch": lambda: buffer.dispatch(step.tokens[me], **new_routes),
            "dispatch ": lambda: buffer.dispatch(step.tokens[me], handle),
            "combine": lambda: buffer.combine(rows, handle),
        }.items():
            assert python_functions_of(call) == [name.strip(), "__init__"]  # of EventOverlap


def test_attributes_and_queries(monkeypatch):
    monkeypatch.setattr(deep_ep.Buffer, "num_sms", 20)
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "64")

    def body(rank):
        buffer = deep_ep.Buffer(rank, 5, 6, True, 1, True, False, False, True, False)
        assert (buffer.rank, buffer.group_size, buffer.group) == (rank.index, 2, rank)
        assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes, buffer.low_latency_mode) == (5, 6, True)
        assert buffer.explicitly_destroy and not buffer.enable_shrink and buffer.nvshmem_qp_depth == 64
        assert buffer.runtime is not None
        assert buffer.get_comm_stream() is None or buffer.get_comm_stream().cuda_stream
        buffer.destroy()
        assert buffer.runtime is None
        with pytest.raises(AssertionError):
            deep_ep.Buffer(rank).destroy()

    ferry.Group.threads(2).run(body)
    assert deep_ep.Buffer.is_sm90_compiled()
    deep_ep.Buffer.set_num_sms(24)
    with pytest.raises(AssertionError):
        deep_ep.Buffer.set_num_sms(25)
    for ranks in (1, 2, 3, 8, 160):
        assert deep_ep.Buffer.get_dispatch_config(ranks) == deep_ep.Config(24, 6, 256, 6, 128)
        assert deep_ep.Buffer.get_combine_config(ranks) == deep_ep.Config(24, 4, 256, 6, 128)
    assert deep_ep.Config().num_sms == 20
    assert deep_ep.Config(24, 8, 256).get_nvl_buffer_size_hint(7168 * 2, 8) > 0
    assert deep_ep.Config(24, 8, 256).get_rdma_buffer_size_hint(7168 * 2, 1) == 0
    of_two_nodes = deep_ep.Config(24, 8, 256, 8, 128).get_rdma_buffer_size_hint(7168 * 2, 16)
    assert 12 * 2 * 2 * 128 * 7168 * 2 < of_two_nodes < 12 * 2 * 2 * 128 * 7168 * 2.5
    assert deep_ep.Config(24, 8, 256, 8, 128).get_rdma_buffer_size_hint(7168 * 2, 4) == of_two_nodes
    assert deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 288) > 2 * 8 * 128 * 7168 * 2


def test_assertions_of_config():
    assert deep_ep.Config(0, 1, 2, 6, 128).num_max_rdma_chunked_recv_tokens == 132  # a multiple of 6
    for numbers, text in [
            ((-2,), "num_sms: expected an integer from 0 .* got -2"),
            (("a",), "num_sms: expected an integer"),
            ((20, 0), "num_max_nvl_chunked_send_tokens: expected an integer from 1 .* got 0"),
            ((20, 6, 0), "num_max_nvl_chunked_recv_tokens: expected an integer from 1"),
            ((20, 256, 256), "num_max_nvl_chunked_send_tokens = 256, must be below num_max_nvl_chunked_recv_tokens = 256"),
            ((20, 6, 256, 0), "num_max_rdma_chunked_send_tokens: expected an integer from 1"),
            ((20, 6, 256, 6, "many"), "num_max_rdma_chunked_recv_tokens: expected an integer from 1 .* got 'many'"),
            ((20, 6, 256, 9, 9), "num_max_rdma_chunked_send_tokens = 9, must be at most half of num_max_rdma_chunked_recv_tokens = 9")]:
        with pytest.raises(ferry.UsageError, match=f"Config: {text}"):
            deep_ep.Config(*numbers)


def test_events(rng):
    step = step_of(rng)

    @on_ranks(2)
    def _(me, buffer):
        two = type(step)(step.experts, step.top_k, step.tokens[:2], step.ids[:2], step.weights[:2])
        before = deep_ep.Buffer.capture()
        *_, handle, event = layout_and_dispatch(
            buffer, two, me, previous_event=before, async_finish=True, allocate_on_comm_stream=True)
        event.current_stream_wait()
        with event:
            pass
        with pytest.raises(ferry.UsageError, match="allocate_on_comm_stream needs"):
            layout_and_dispatch(buffer, two, me, allocate_on_comm_stream=True)
        with pytest.raises(ferry.UsageError, match="exclude each other"):
            low_latency(buffer, two, me, async_finish=True, return_recv_hook=True)
        *_, event, hook = low_latency(buffer, two, me, async_finish=True)
        event.current_stream_wait()
        assert hook is None
        assert deep_ep.EventOverlap().event is None


def test_a_communicator_instead_of_a_group():
    class Alone:
        def Get_rank(self):
            return 0

        def Get_size(self):
            return 1

        def allgather(self, mine):
            return [mine]

        def Barrier(self):
            pass

    buffer = deep_ep.Buffer(None, comm=Alone(), explicitly_destroy=True)
    assert (buffer.rank, buffer.group_size) == (0, 1)
    buffer.destroy()
