"""Dispatch in each format compared with the oracle."""

import ml_dtypes
import numpy as np
import pytest

import ferry
from exchange_steps import exchange_for, inputs
from oracle import bf16, random_step, routes_to, same_bits


@pytest.mark.parametrize("dtype", [bf16, np.float16, np.float32])
def test_unquantised_formats_preserve_bits(rng, dtype):
    name = {bf16: "bf16", np.float16: "fp16", np.float32: "fp32"}[dtype]
    step = random_step(rng, dtype=dtype)

    def body(rank):
        rows = exchange_for(rank, step, format="fp32").dispatch(*inputs(step, rank), format=name)
        assert rows.data.dtype == dtype and rows.scales is None
        for position, (_, source, token, _) in enumerate(routes_to(step, rank.index)):
            assert same_bits(rows.data[position], step.tokens[source][token])

    ferry.Group.threads(4).run(body)


@pytest.mark.parametrize("columns", [False, True])
def test_fp8_with_scales(rng, columns):
    hidden = 272
    step = random_step(rng, hidden=hidden)

    def body(rank):
        exchange = exchange_for(rank, step, hidden=hidden, format="fp8-columns" if columns else "fp8")
        rows = exchange.dispatch(*inputs(step, rank))
        assert rows.data.dtype == ml_dtypes.float8_e4m3fn and rows.scales.shape == (exchange.capacity, 3)
        for position, (_, source, token, _) in enumerate(routes_to(step, rank.index)):
            x = step.tokens[source][token].astype(np.float32)
            for block in range(3):
                part = slice(block * 128, min(hidden, block * 128 + 128))
                s = max(np.abs(x[part]).max(), np.float32(1e-4))
                assert rows.scales[position, block] == np.float32(s) / np.float32(448)
                q = (x[part] * (np.float32(448) / np.float32(s))).astype(ml_dtypes.float8_e4m3fn)
                assert same_bits(rows.data[position, part], q)

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


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("rule", ["up", "ocp"])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_mx_formats(rng, name, rule, columns):
    hidden, narrow = 288, name == "mxfp4"  # nine blocks: three bytes of the last word are unused
    step = random_step(rng, hidden=hidden)
    element, top, largest = (ml_dtypes.float4_e2m1fn, 2, 6) if narrow else (ml_dtypes.float8_e4m3fn, 8, 448)

    def body(rank):
        exchange = exchange_for(rank, step, hidden=hidden, format=f"{name}-{rule}" + ("-columns" if columns else ""))
        rows = exchange.dispatch(*inputs(step, rank))
        assert rows.data.dtype == (np.uint8 if narrow else ml_dtypes.float8_e4m3fn)
        assert rows.data.shape == (exchange.capacity, hidden // 2 if narrow else hidden)
        assert rows.scales.dtype == (np.int32 if columns else np.uint8)
        for position, (_, source, token, _) in enumerate(routes_to(step, rank.index)):
            blocks = step.tokens[source][token].astype(np.float64).reshape(9, 32)
            amax = np.abs(blocks).max(axis=1)
            exponents = np.floor(np.log2(amax)) - top
            if rule == "up":
                exponents += amax / 2.0**exponents > largest
            scales = np.ascontiguousarray(rows.scales[position]).view(np.uint8)
            assert np.array_equal(scales, np.append(exponents + 127, [0, 0, 0]))
            assert same_bits(scales[:9].view(ml_dtypes.float8_e8m0fnu).astype(np.float64), 2.0**exponents)
            codes = np.clip(blocks / 2.0 ** exponents[:, None], -largest, largest).astype(np.float32).astype(element)
            expected = codes.reshape(-1).view(np.uint8)
            assert np.array_equal(rows.data[position].view(np.uint8), expected[::2] | expected[1::2] << 4 if narrow else expected)

    ferry.Group.threads(4).run(body)


@pytest.mark.parametrize("dtype", [bf16, np.float16])
@pytest.mark.parametrize("rule", ["up", "ocp"])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_mx_formats_of_every_16_bit_value(name, rule, dtype):
    element, top, largest, nan = (ml_dtypes.float4_e2m1fn, 2, 6, 7) if name == "mxfp4" else (ml_dtypes.float8_e4m3fn, 8, 448, 0x7F)
    every = np.arange(65536, dtype=np.uint16)
    octave = 128 if dtype == bf16 else 1024
    # Blocks of neighbouring values, and blocks of values that lie a power of two apart.
    bits = np.concatenate([every, every.reshape(-1, octave).T.reshape(-1)])
    tokens = bits.view(dtype).reshape(32, 4096)
    with np.errstate(all="ignore"):
        blocks = tokens.astype(np.float64).reshape(-1, 32)
        amax = np.fmax.reduce(np.abs(blocks), axis=1, initial=0)
        half, exponents = np.frexp(amax)  # half in [0.5, 1)
        exponents = exponents - 1 - top + ((rule == "up") & (half > largest / 2 ** (top + 1)))
        exponents = np.select([amax == 0, np.isinf(amax)], [-127, 127], exponents.clip(-127, 127))
        scaled = np.ldexp(blocks, -exponents[:, None]).clip(-largest, largest)
        codes = np.where(np.isnan(blocks), nan, scaled.astype(np.float32).astype(element).view(np.uint8)).astype(np.uint8)
    values = codes.reshape(32, 4096)
    if name == "mxfp4":
        values = values[:, ::2] | values[:, 1::2] << 4

    def body(rank):
        exchange = ferry.Exchange(rank, experts=1, top_k=1, hidden=4096, max_tokens=32, format=f"{name}-{rule}")
        rows = exchange.dispatch(tokens, np.zeros((32, 1), np.int64))
        assert np.array_equal(rows.scales, (exponents + 127).astype(np.uint8).reshape(32, 128))
        assert np.array_equal(rows.data.view(np.uint8), values)

    ferry.Group.threads(1).run(body)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-token", "nvfp4-columns"])
def test_nvfp4(rng, name):
    hidden, g = 96, np.float32(0.37)
    step = random_step(rng, hidden=hidden)

    def body(rank):
        exchange = exchange_for(rank, step, hidden=hidden, format=name)
        given = {} if name == "nvfp4-token" else {"global_scale": np.array([g]) if rank.index % 2 else float(g)}
        rows = exchange.dispatch(*inputs(step, rank), **given)
        assert rows.data.dtype == np.uint8 and rows.data.shape == (exchange.capacity, hidden // 2)
        for position, (_, source, token, _) in enumerate(routes_to(step, rank.index)):
            blocks = step.tokens[source][token].astype(np.float32).reshape(6, 16)
            scale_of_row = max(np.abs(blocks).max() / np.float32(2688), np.float32(2**-126)) if name == "nvfp4-token" else g
            scales = (np.abs(blocks).max(axis=1) / np.float32(6) / scale_of_row).astype(ml_dtypes.float8_e4m3fn)
            assert np.array_equal(np.ascontiguousarray(rows.scales[position]).view(np.uint8), np.append(scales.view(np.uint8), [0, 0]))
            divisors = scales.astype(np.float32) * scale_of_row
            codes = np.clip(blocks / divisors[:, None], -6, 6).astype(ml_dtypes.float4_e2m1fn).reshape(-1).view(np.uint8)
            assert np.array_equal(rows.data[position], codes[::2] | codes[1::2] << 4)
            if name == "nvfp4-token":
                assert rows.parts[2].reshape(-1)[position] == scale_of_row

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


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4"])
def test_input_scales(rng, name):
    step = random_step(rng, hidden=96)
    experts = step.experts
    scales = rng.uniform(0.01, 3, experts).astype(np.float32)

    def body(rank):
        exchange = exchange_for(rank, step, hidden=96)  # bf16, as the tokens travel
        rows = exchange.dispatch(*inputs(step, rank), format=name, input_scales=scales)
        assert len(rows.parts) == (1 if name == "fp8" else 2)
        assert (rows.scales is None) == (name == "fp8")
        for position, (expert, source, token, _) in enumerate(routes_to(step, rank.index)):
            x = step.tokens[source][token].astype(np.float32) / scales[expert]
            if name == "fp8":
                assert same_bits(rows.data[position], np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn))
            elif name == "mxfp8":
                half, exponents = np.frexp(np.abs(x.reshape(3, 32)).max(1))
                exponents = np.where(np.abs(x.reshape(3, 32)).max(1) == 0, -127, exponents - 9 + (half > 0.875))
                assert np.array_equal(rows.scales[position][:3], (exponents + 127).astype(np.uint8))
            else:
                blocks = step.tokens[source][token].astype(np.float32).reshape(6, 16)
                expected = (np.abs(blocks).max(axis=1) / np.float32(6) / scales[expert]).astype(ml_dtypes.float8_e4m3fn)
                assert same_bits(np.ascontiguousarray(rows.scales[position])[:6], expected)
        with pytest.raises(ferry.UsageError, match="input_scales: expected"):
            exchange.dispatch(*inputs(step, rank), format=name, input_scales=scales[:-1])
        with pytest.raises(ferry.UsageError, match="input_scales are for the formats"):
            exchange.dispatch(*inputs(step, rank), input_scales=scales)

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
