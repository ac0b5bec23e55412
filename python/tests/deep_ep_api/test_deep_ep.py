"""The deep_ep interface with NumPy on the CPU backend: shapes, types, order and conventions of every method."""

import ml_dtypes
import numpy as np
import pytest

import ferry
import ferry.deep_ep as deep_ep
from called_functions import python_functions_of
from deep_ep_steps import HIDDEN, fp8, layout_and_dispatch, low_latency, on_ranks, step_of
from oracle import bf16, rank_of, routes_to, messages_to, partial_sums, same_bits

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


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("ids", [np.int32, np.int64])
def test_rows_of_low_latency_mode(rng, hook, ids):
    step = step_of(rng, ids=ids)

    @on_ranks(4)
    def _(me, buffer):
        stats = np.full(4, 100, np.int32)
        recv, counts, handle, event, call = low_latency(
            buffer, step, me, use_fp8=False, return_recv_hook=hook, cumulative_local_expert_recv_stats=stats)
        assert (call is not None) == hook
        if hook:
            with pytest.raises(ferry.UsageError, match="call the dispatch's hook first"):
                handle[0]
            call()
        assert recv.shape == (4, 4 * 9, HIDDEN) and recv.dtype == bf16
        assert counts.shape == (4,) and counts.dtype == np.int32 and stats.tolist() == (counts + 100).tolist()
        source, ranges, *sizes = handle
        assert source.shape == (4, 36) and source.dtype == np.int32 and ranges.shape == (4, 4) and ranges.dtype == np.int64
        assert sizes == [9, HIDDEN, 16] and len(handle) == 5
        for local in range(4):
            routes = [route for route in routes_to(step, me) if route[0] == me * 4 + local]
            assert counts[local] == len(routes)
            for position, (_, rank, token, _) in enumerate(routes):
                assert source[local, position] == token and same_bits(recv[local, position], step.tokens[rank][token])
            for rank in range(4):
                begin, count = int(ranges[local, rank]) >> 32, int(ranges[local, rank]) & 0xFFFFFFFF
                assert [r for r in routes[begin : begin + count]] == [r for r in routes if r[1] == rank]


def lies_as_deep_gemm_reads_it(scale):
    """Whether the strides of scales [experts, rows, columns] are those that DeepGEMM asks for before a grouped GEMM, on SM90 of
    float32 and on SM100 of int32: rows are adjacent, columns 16 bytes aligned, and experts dense."""
    experts, rows, columns = (stride // scale.itemsize for stride in scale.strides)
    aligned = -(-scale.shape[1] // (16 // scale.itemsize)) * (16 // scale.itemsize)
    return rows == 1 and columns == aligned and experts == columns * scale.shape[2]


@pytest.mark.parametrize("use_ue8m0", [False, True])
@pytest.mark.parametrize("experts", [4, 16])
def test_scales_for_deep_gemm(rng, use_ue8m0, experts):
    step = step_of(rng, hidden=1024, experts=experts)

    @on_ranks(4)
    def _(me, buffer):
        (_, scale), *_ = low_latency(buffer, step, me, round_scale=use_ue8m0, use_ue8m0=use_ue8m0)
        assert lies_as_deep_gemm_reads_it(scale) == (experts == 4)  # with one local expert
        # What docs/guides/deep_ep.md says to do with more.
        assert lies_as_deep_gemm_reads_it(np.ascontiguousarray(scale.transpose(0, 2, 1)).transpose(0, 2, 1))


@pytest.mark.parametrize("scales", ["plain", "round", "ue8m0"])
def test_fp8_of_low_latency_mode(rng, scales):
    step = step_of(rng, hidden=1024)
    settings = {"plain": {}, "round": {"round_scale": True}, "ue8m0": {"round_scale": True, "use_ue8m0": True}}[scales]

    @on_ranks(4)
    def _(me, buffer):
        (values, scale), counts, handle, *_ = low_latency(buffer, step, me, **settings)
        columns = 2 if scales == "ue8m0" else 8
        assert values.shape == (4, 36, 1024) and values.dtype == fp8
        assert scale.shape == (4, 36, columns) and scale.dtype == (np.int32 if scales == "ue8m0" else np.float32)
        assert scale.strides == (36 * 4, 4, 4 * 36 * 4)  # neighbouring rows are adjacent; a column spans all experts
        for local in range(4):
            routes = [route for route in routes_to(step, me) if route[0] == me * 4 + local]
            for position, (_, rank, token, _) in enumerate(routes):
                x = step.tokens[rank][token].astype(np.float32).reshape(8, 128)
                amax = np.maximum(np.abs(x).max(1), np.float32(1e-4))
                exact = amax / np.float32(448)
                rounded = np.exp2(np.ceil(np.log2(exact.astype(np.float64)))).astype(np.float32)
                factor = np.float32(448) / amax if scales == "plain" else 1 / rounded
                assert same_bits(values[local, position], (x * factor[:, None]).astype(fp8).ravel())
                if scales == "ue8m0":
                    exponents = scale[local, position].copy().view(np.uint8)
                    assert exponents.tolist() == (rounded.view(np.int32) >> 23).tolist()
                else:
                    assert same_bits(scale[local, position].copy(), exact if scales == "plain" else rounded)


# Reads NVFP4 rows as callers do: values [R*M, H/2, L], scales [32, 4, rows of tiles, 4, tiles, L], and the factor that they
# passed. Returns [L, R*M, H] in fp32.
def decoded_nvfp4(values, scales, x_global_scale):
    packed = values.transpose(2, 0, 1)
    codes = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(*packed.shape[:2], -1)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    tiles = scales.astype(np.float32).transpose(5, 2, 4, 0, 1, 3)  # [L, rows of tiles, tiles, 32, 4, 4]
    local, tall, wide = tiles.shape[:3]
    of_rows = tiles.transpose(0, 1, 4, 3, 2, 5).reshape(local, tall * 128, wide * 4)
    of_columns = of_rows.repeat(16, axis=2)[:, : codes.shape[1], : codes.shape[2]]
    return table[codes] * (of_columns * (np.float32(1) / x_global_scale))


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("hidden", [256, 288])
def test_nvfp4_of_low_latency_mode(rng, hook, hidden):
    step = step_of(rng, hidden=hidden)
    # Callers calibrate the factor so that the largest value fits: 448 * 6 / amax.
    factor = np.float32(448 * 6) / max(np.abs(x.astype(np.float32)).max(initial=1) for x in step.tokens)

    @on_ranks(4)
    def _(me, buffer):
        given = [factor.reshape(1), float(factor), np.full((16,), factor), np.array(factor)][me]
        (values, scales), counts, handle, _, call = low_latency(
            buffer, step, me, use_fp8=me % 2 == 0, use_nvfp4=True, x_global_scale=given, return_recv_hook=hook)
        if hook:
            call()
        assert values.shape == (36, hidden // 2, 4) and values.dtype == np.uint8
        assert values.strides == (hidden // 2, 1, 36 * hidden // 2)
        wide = -(-hidden // 64)
        assert scales.shape == (32, 4, 1, 4, wide, 4) and scales.dtype == fp8
        assert scales.strides == (16, 4, wide * 512, 1, 512, wide * 512)
        decoded, g = decoded_nvfp4(values, scales, factor), np.float32(1) / factor
        for local in range(4):
            routes = [route for route in routes_to(step, me) if route[0] == me * 4 + local]
            assert counts[local] == len(routes)
            for position, (_, rank, token, _) in enumerate(routes):
                x = step.tokens[rank][token].astype(np.float32).reshape(-1, 16)
                amax = np.abs(x).max(1, keepdims=True)
                error = np.abs(decoded[local, position].reshape(-1, 16) - x)
                assert (error <= 0.25 * amax + 1e-6).all()
                exact = (amax / np.float32(6) / g).astype(fp8).astype(np.float32) * g
                codes = np.clip(x / exact, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
                assert np.allclose(decoded[local, position].reshape(-1, 16), codes * exact, rtol=1e-6, atol=0)
        # The experts' outputs go back as without quantisation.
        y, *_ = buffer.low_latency_combine(decoded.astype(bf16), step.ids[me], step.weights[me], handle)
        assert y.shape == step.tokens[me].shape and np.isfinite(y.astype(np.float32)).all()


def test_bad_factors_of_nvfp4(rng):
    step = step_of(rng)

    @on_ranks(4)
    def _(me, buffer):
        for bad, words in [(np.array([1, 2], np.float32), "x_global_scale: values 1 and 2 differ"),
                           (np.ones(1, np.float64), "x_global_scale: expected a number or float32"),
                           (np.ones(0, np.float32), "x_global_scale: expected a number or float32"),
                           (True, "x_global_scale: expected a number or float32 values, got bool"),
                           (0, "x_global_scale = 0: must be positive and finite"),
                           (-2.0, "x_global_scale = -2: must be positive and finite"),
                           (float("nan"), "x_global_scale = nan: must be positive and finite"),
                           (10**400, "x_global_scale = 1000.*: beyond the range of float32"),
                           (np.full(3, np.inf, np.float32), "x_global_scale = inf: must be positive and finite"),
                           (np.full(1, 1e-40, np.float32), "x_global_scale = 9.99995e-41: must be positive and finite")]:
            with pytest.raises(ferry.UsageError, match=words):
                low_latency(buffer, step, me, use_nvfp4=True, x_global_scale=bad if me == 1 else 1.0)
        with pytest.raises(ferry.UnsupportedError, match="use_ue8m0_for_sf"):
            low_latency(buffer, step, me, use_nvfp4=True, use_ue8m0_for_sf=True)
        (values, _), *_ = low_latency(buffer, step, me, use_nvfp4=True)  # without a factor: 1
        assert values.dtype == np.uint8


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("way", ["new", "out", "zero_copy", "logfmt"])
def test_combine_of_low_latency_mode(rng, hook, way):
    step = step_of(rng)

    @on_ranks(4)
    def _(me, buffer):
        recv, counts, handle, *_ = low_latency(buffer, step, me, use_fp8=False)
        outputs = np.where(np.arange(36)[:, None] < counts[:, None, None], recv, bf16(0)) * bf16(2)
        settings = {"return_recv_hook": hook}
        if way == "out":
            settings["out"] = np.full(step.tokens[me].shape, np.nan, bf16)
        if way == "zero_copy":
            buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = outputs
            outputs = buffer.get_next_low_latency_combine_buffer(handle)
            settings["zero_copy"] = True
        if way == "logfmt":
            settings["use_logfmt"] = True
        y, event, call = buffer.low_latency_combine(outputs, step.ids[me], step.weights[me], handle, **settings)
        if hook:
            call()
        assert (call is not None) == hook and (way != "out" or y is settings["out"])
        weights = np.where(step.ids[me] >= 0, step.weights[me], 0).sum(1, keepdims=True)
        assert y.dtype == bf16 and np.allclose(y.astype(np.float32), 2 * weights * step.tokens[me].astype(np.float32), rtol=2e-2, atol=2e-2)
        if not hook:
            expected = partial_sums(step, me, lambda r, t, k: (step.tokens[r][t] * bf16(2)).astype(np.float32))
            assert same_bits(y, expected.astype(bf16))


def test_two_calls_with_pending_hooks(rng):
    steps = [step_of(rng), step_of(rng)]

    @on_ranks(4)
    def _(me, buffer):
        alone = [low_latency(buffer, step, me, use_fp8=False)[0].copy() for step in steps]
        first = low_latency(buffer, steps[0], me, use_fp8=False, return_recv_hook=True)
        second = low_latency(buffer, steps[1], me, use_fp8=False, return_recv_hook=True)
        second[4]()
        y = buffer.low_latency_combine(second[0], steps[1].ids[me], steps[1].weights[me], second[2], return_recv_hook=True)
        third = low_latency(buffer, steps[0], me, use_fp8=False)  # while a dispatch and a combine wait for their hooks
        first[4]()
        y[2]()
        for result, expected in ((first, alone[0]), (second, alone[1]), (third, alone[0])):
            for local, count in enumerate(result[1]):
                assert same_bits(result[0][local, :count], expected[local, :count])


def test_masks_and_shrinking():
    @on_ranks(2)
    def _(me, buffer):
        mask = np.full(2, 7, np.int32)
        buffer.low_latency_query_mask_buffer(mask)
        assert mask.tolist() == [0, 0]
        buffer.low_latency_clean_mask_buffer()
        buffer.clean_low_latency_buffer(9, HIDDEN, 16)
        with pytest.raises(ferry.UnsupportedError):
            buffer.low_latency_update_mask_buffer(1, True)
        for unsupported in (buffer.internode_dispatch, buffer.internode_combine):
            with pytest.raises(ferry.UnsupportedError, match="all ranks are on one node"):
                unsupported(None, None)
        with pytest.raises(ferry.UnsupportedError):
            buffer.get_local_buffer_tensor(np.uint8)

    def body(rank):
        with pytest.raises(ferry.UnsupportedError, match="enable_shrink"):
            deep_ep.Buffer(rank, enable_shrink=True)
        with pytest.raises(ferry.UnsupportedError, match="RDMA"):
            deep_ep.Buffer(rank, low_latency_mode=True, allow_nvlink_for_low_latency_mode=False)

    ferry.Group.threads(1).run(body)


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
