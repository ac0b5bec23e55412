"""Types and shapes of the received parts in each format. Their values are those of the contract suite (contract_python)."""

import ml_dtypes
import numpy as np
import pytest

import ferry
from exchange_steps import exchange_for, inputs
from oracle import bf16, random_step, routes_to, same_bits


@pytest.mark.parametrize("name, type_of_rows, columns, type_of_scales, scales", [
    ("bf16", bf16, 288, None, 0), ("fp16", np.float16, 288, None, 0), ("fp32", np.float32, 288, None, 0),
    ("fp8", ml_dtypes.float8_e4m3fn, 288, np.float32, 3), ("fp8-columns", ml_dtypes.float8_e4m3fn, 288, np.float32, 3),
    ("mxfp8", ml_dtypes.float8_e4m3fn, 288, np.uint8, 12), ("mxfp8-ocp-columns", ml_dtypes.float8_e4m3fn, 288, np.int32, 3),
    ("mxfp4", np.uint8, 144, np.uint8, 12), ("mxfp4-up-columns", np.uint8, 144, np.int32, 3),
    ("nvfp4", np.uint8, 144, ml_dtypes.float8_e4m3fn, 20), ("nvfp4-columns", np.uint8, 144, np.int32, 5),
    ("nvfp4-token", np.uint8, 144, ml_dtypes.float8_e4m3fn, 20)])
def test_types_and_shapes(rng, name, type_of_rows, columns, type_of_scales, scales):
    plain = type_of_scales is None
    step = random_step(rng, hidden=288, dtype=type_of_rows if plain else bf16)

    def body(rank):
        exchange = exchange_for(rank, step, hidden=288, format=name)
        rows = exchange.dispatch(*inputs(step, rank))
        assert rows.data.dtype == type_of_rows and rows.data.shape == (exchange.capacity, columns)
        assert len(rows.parts) == (1 if plain else 3 if name == "nvfp4-token" else 2)
        if plain:
            assert rows.scales is None
        else:
            assert rows.scales.dtype == type_of_scales and rows.scales.shape == (exchange.capacity, scales)
        if name == "nvfp4-token":
            assert rows.parts[2].dtype == np.float32 and rows.parts[2].size == exchange.capacity

    ferry.Group.threads(4).run(body)


def test_packed_power_of_two_scales(rng):
    hidden = 512
    step = random_step(rng, hidden=hidden)

    def body(rank):
        exchange = exchange_for(rank, step, hidden=hidden, format="fp8-columns-pow2-packed", layout="expert_padded")
        rows = exchange.dispatch(*inputs(step, rank))
        plain = exchange.dispatch(*inputs(step, rank), format="fp8-pow2", memory=ferry.ReceiveBuffers(
            (np.empty(rows.data.shape, ml_dtypes.float8_e4m3fn), np.empty((*rows.data.shape[:2], 4), np.float32))))
        assert rows.scales.dtype == np.int32 and rows.scales.shape == (*rows.data.shape[:2], 1)
        for group, count in enumerate(rows.counts):
            exponents = (plain.scales[group, :count].view(np.int32) >> 23).astype(np.uint8)
            assert np.array_equal(rows.scales[group, :count].copy().view(np.uint8), exponents)

    ferry.Group.threads(4).run(body)


@pytest.mark.parametrize("name, words", [("fp8", 6), ("fp8-pow2-packed", 2), ("mxfp8", 6), ("nvfp4-token", 11)])
def test_each_group_of_expert_padded_has_columns_of_its_own(rng, name, words):
    hidden, capacity, leading = 672, 29, 32
    step = random_step(rng, hidden=hidden)

    def body(rank):
        exchange = exchange_for(rank, step, hidden=hidden, layout="expert_padded", capacity=capacity, shared_experts=1,
                                format=name + "-columns")
        rows = exchange.dispatch(*inputs(step, rank))
        assert rows.scales.shape == (rows.groups, capacity, words)
        assert rows.scales.strides == (words * leading * 4, 4, leading * 4)
        got, counts = rows.scales.copy(), rows.counts.copy()
        plain = exchange.dispatch(*inputs(step, rank), format=name)
        assert np.array_equal(plain.counts, counts) and counts[0] == len(step.tokens[rank.index])
        for group, count in enumerate(counts):
            assert same_bits(got[group, :count], plain.scales[group, :count].view(got.dtype))

    ferry.Group.threads(4).run(body)


def nvfp4_dispatch(rng):
    """Makes a function for each rank: a dispatch of the same tokens in nvfp4 with a global_scale."""
    tokens = rng.standard_normal((2, 96)).astype(bf16)
    ids, weights = np.array([[0, 3], [2, -1]]), rng.random((2, 2), np.float32)

    def of_rank(rank):
        exchange = ferry.Exchange(rank, experts=4, top_k=2, hidden=96, max_tokens=2, format="nvfp4")
        return lambda given: exchange.dispatch(tokens, ids, weights, global_scale=given)

    return of_rank


# NumPy's numbers of any type, and arrays of one element.
def test_global_scales_of_numpy(rng):
    of_rank = nvfp4_dispatch(rng)

    def body(rank):
        dispatch = of_rank(rank)

        def parts(given):
            return [part.view(np.uint8).copy() for part in dispatch(given).parts]

        expected = parts(0.5)
        for given in [np.float16(0.5), np.float32(0.5), np.float64(0.5), np.longdouble(0.5), np.array(0.5, np.float32), np.full(1, 0.5, np.float32)]:
            for actual, wanted in zip(parts(given), expected, strict=True):
                assert np.array_equal(actual, wanted)
        assert all(np.array_equal(actual, wanted) for actual, wanted in zip(parts(np.int64(2)), parts(2), strict=True))

    ferry.Group.threads(2).run(body)


# Numbers that are no scale end the call on the rank that passed them, or, if they are no number, on every rank.
def test_bad_global_scales(rng):
    of_rank = nvfp4_dispatch(rng)

    def body(rank):
        dispatch = of_rank(rank)

        def refused(given, words):
            with pytest.raises(ferry.UsageError, match=words):
                dispatch(given)

        for bad, text in [(0, "0"), (-1.5, "-1.5"), (float("inf"), "inf"), (float("nan"), "nan"), (np.zeros(1, np.float32), "0"),
                          (np.float32(-2), "-2"), (np.array(0, np.float32), "0")]:
            refused(bad, f"global_scale = {text} on rank {rank.index}, must be positive and finite")
        for bad, words in [(True, "global_scale: expected a number or float32 values, got bool"),
                           (10**400, "global_scale = 1000.*: beyond the range of float32"),
                           (-1e300, "global_scale = -1e.300: beyond the range of float32"),
                           (1e-46, "global_scale = 1e-46: beyond the range of float32"),
                           (np.ones(2, np.float32), "global_scale: expected an array of shape"),
                           (np.ones(1, np.float64), "global_scale: expected float32"),
                           (np.array(1.0), "global_scale: expected float32"),
                           (np.float64(1e300), "global_scale = .*1e.300.*: beyond the range of float32"),
                           (np.bool_(True), "global_scale: expected .*, got bool"),
                           (np.complex64(1), "global_scale: expected"), ("0.5", "global_scale: expected"), (np.str_("0.5"), "global_scale: expected")]:
            refused(bad if rank.index == 1 else 0.5, words)
        assert dispatch(0.5).data.dtype == np.uint8

    ferry.Group.threads(2).run(body)


# The scales of a group by a permutation of its tiles: [tiles of rows, tiles, 32, 4, 4] holds row 128 i + 32 b + a and
# block 4 j + c at [i, j, a, b, c].
def rows_of_tiles(tiles):
    tall, wide = tiles.shape[:2]
    return tiles.transpose(0, 3, 2, 1, 4).reshape(128 * tall, 4 * wide)


@pytest.mark.parametrize("layout", ["expert_major", "expert_padded"])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4-up", "nvfp4", "nvfp4-token"])
def test_scales_as_tiles(rng, name, layout):
    hidden = 96
    step = random_step(rng, hidden=hidden)

    def body(rank):
        in_rows = exchange_for(rank, step, hidden=hidden, format=name, layout=layout)
        in_tiles = exchange_for(rank, step, hidden=hidden, format=f"{name}-tiles", layout=layout)
        rows, tiled = (exchange.dispatch(*inputs(step, rank)) for exchange in (in_rows, in_tiles))
        assert rows.tile_offsets is None
        assert tiled.scales.shape[1:] == (2 if name.startswith("nvfp4") else 1, 32, 4, 4)
        assert tiled.scales.dtype == rows.scales.dtype
        assert len(tiled.tile_offsets) == tiled.groups + 1
        for group, count in enumerate(tiled.counts):
            first = tiled.tile_offsets[group]
            scales = rows_of_tiles(tiled.scales[first : first + -(-int(count) // 128)].view(np.uint8))
            begin = rows.row_offsets[group]
            flat = rows.scales.reshape(-1, rows.scales.shape[-1]).view(np.uint8)
            assert np.array_equal(scales[:count, : flat.shape[1]], flat[begin : begin + count])
            assert not scales[count:].any()
            assert not scales[:, flat.shape[1] :].any()
        out = tuple(np.full_like(part, 1) if part.dtype == np.uint8 else np.empty_like(part) for part in tiled.parts)
        again = in_tiles.dispatch(*inputs(step, rank), memory=ferry.ReceiveBuffers(out))
        assert again.scales is out[1]
        words = r"memory.parts\[1\]: expected \d+ bytes or more for \d+ rows in tiles of 128 rows, with one more for each of \d+ groups, got \d+: pass"
        with pytest.raises(ferry.UsageError, match=words):
            in_tiles.dispatch(*inputs(step, rank), memory=ferry.ReceiveBuffers((out[0], out[1][:1], *out[2:])))

    ferry.Group.threads(4).run(body)


@pytest.mark.parametrize("layout", ["expert_major", "expert_padded"])
@pytest.mark.parametrize("name", ["bf16", "fp8", "fp8-columns", "fp8-columns-pow2-packed", "mxfp8-columns", "mxfp4-up-tiles",
                                  "nvfp4-token", "nvfp4-token-columns", "nvfp4-token-tiles"])
def test_the_arrays_of_a_result_are_receive_buffers(rng, name, layout):
    hidden, capacity = 96 if name.endswith("tiles") else 672, 29 if layout == "expert_padded" else 85
    step = random_step(rng, hidden=hidden)

    def body(rank):
        exchange = exchange_for(rank, step, hidden=hidden, layout=layout, capacity=capacity, format=name, lanes=2)
        first = exchange.dispatch(*inputs(step, rank))
        memory = ferry.ReceiveBuffers(first.parts, counts=first.counts, row_offsets=first.row_offsets)
        kept = [part.copy() for part in first.parts]
        begin, end = first.row_offsets[:-1].copy(), first.row_offsets[:-1] + first.counts
        ids = inputs(step, rank)[1]
        for route in (ids, exchange.dispatch(*inputs(step, rank), lane=1).plan.copy()):
            for part in first.parts:
                part[...] = 1
            again = exchange.dispatch(step.tokens[rank.index], route, lane=1, memory=memory)
            for number, (part, expected) in enumerate(zip(again.parts, kept)):
                assert part.shape == expected.shape and np.shares_memory(part, first.parts[number])
                if number == 1 and name.endswith("tiles"):
                    for tile, count in zip(again.tile_offsets, again.counts):
                        tiles = slice(tile, tile + -(-int(count) // 128))
                        assert same_bits(part[tiles], expected[tiles])
                    continue
                rows, expected = (array.reshape(-1, array.shape[-1]) for array in (part, expected))
                for row in (row for b, e in zip(begin, end) for row in range(b, e)):
                    assert same_bits(rows[row], expected[row])

    ferry.Group.threads(4).run(body)


def test_raw_parts_are_moved_unchanged(rng):
    step = random_step(rng)
    parts = [
        (rng.integers(0, 256, (len(x), 48)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn), rng.random((len(x), 4), np.float32))
        for x in step.tokens
    ]

    def body(rank):
        exchange = exchange_for(rank, step, format="raw:48+16")
        rows = exchange.dispatch(parts[rank.index], step.ids[rank.index])
        assert [part.dtype for part in rows.parts] == [ml_dtypes.float8_e4m3fn, np.float32]
        assert rows.weight is None
        for position, (_, source, token, _) in enumerate(routes_to(step, rank.index)):
            for received, sent in zip(rows.parts, parts[source]):
                assert same_bits(received[position], sent[token])

    ferry.Group.threads(4).run(body)


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4"])
def test_input_scales(rng, name):
    step = random_step(rng, hidden=96)
    scales = rng.uniform(0.01, 3, step.experts).astype(np.float32)

    def body(rank):
        exchange = exchange_for(rank, step, hidden=96)  # bf16, as the tokens travel
        rows = exchange.dispatch(*inputs(step, rank), format=name, input_scales=scales)
        assert len(rows.parts) == (1 if name == "fp8" else 2)
        assert (rows.scales is None) == (name == "fp8")
        with pytest.raises(ferry.UsageError, match="input_scales: expected"):
            exchange.dispatch(*inputs(step, rank), format=name, input_scales=scales[:-1])
        with pytest.raises(ferry.UsageError, match="input_scales are for the formats"):
            exchange.dispatch(*inputs(step, rank), input_scales=scales)

    ferry.Group.threads(4).run(body)
