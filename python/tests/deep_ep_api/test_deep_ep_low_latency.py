"""`ferry.deep_ep` in low-latency mode."""

import ml_dtypes
import numpy as np
import pytest

import ferry
import ferry.deep_ep as deep_ep
from deep_ep_steps import HIDDEN, fp8, low_latency, on_ranks, step_of
from oracle import bf16, routes_to, partial_sums, same_bits


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
        assert scale.shape[0] == experts // 4 and lies_as_deep_gemm_reads_it(scale)


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
        assert scale.strides == (columns * 36 * 4, 4, 36 * 4)  # as DeepEP's
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
@pytest.mark.parametrize("hidden, experts, top_k, most", [(256, 16, 3, 9), (288, 16, 3, 9), (96, 8, 8, 120)])
def test_nvfp4_of_low_latency_mode(rng, hook, hidden, experts, top_k, most):
    step = step_of(rng, hidden=hidden, experts=experts, top_k=top_k, most=most)
    capacity, local_experts = 4 * most, experts // 4
    # Callers calibrate the factor so that the largest value fits: 448 * 6 / amax.
    factor = np.float32(448 * 6) / max(np.abs(x.astype(np.float32)).max(initial=1) for x in step.tokens)

    @on_ranks(4)
    def _(me, buffer):
        given = [factor.reshape(1), factor if hook else float(factor), np.full((16,), factor), np.array(factor)][me]
        (values, scales), counts, handle, _, call = low_latency(
            buffer, step, me, most, use_fp8=me % 2 == 0, round_scale=me > 1, use_ue8m0=me > 1, use_nvfp4=True, x_global_scale=given,
            async_finish=False, return_recv_hook=hook)
        if hook:
            call()
        assert values.shape == (capacity, hidden // 2, local_experts) and values.dtype == np.uint8
        assert values.strides == (hidden // 2, 1, capacity * hidden // 2)
        wide, tall = -(-hidden // 64), -(-capacity // 128)
        assert scales.shape == (32, 4, tall, 4, wide, local_experts) and scales.dtype == fp8
        assert scales.strides == (16, 4, wide * 512, 1, 512, tall * wide * 512)
        decoded, g = decoded_nvfp4(values, scales, factor), np.float32(1) / factor
        for local in range(local_experts):
            routes = [route for route in routes_to(step, me) if route[0] == me * local_experts + local]
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
                           (np.float32(-2), "x_global_scale = -2: must be positive and finite"),
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
