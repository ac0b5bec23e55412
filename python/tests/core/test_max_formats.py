"""ferry.max in every format: all parts of the received rows decode to the tokens that were sent."""

import ml_dtypes
import numpy as np
import pytest

import ferry
import ferry.max
from max_steps import expected_dispatch
from oracle import bf16, random_step, routes_to, same_bits


def decoded(received, name, hidden, groups):
    """float32 [rows, H]: the received values. `groups`: the group of each row and its position there."""
    values, *others = received.parts
    if values.dtype == np.uint8:
        codes = np.stack([values & 15, values >> 4], 2).reshape(len(values), hidden)
        values = codes.view(ml_dtypes.float4_e2m1fn)
    values = values.astype(np.float32)
    if not others:
        return values
    scales = others[0]
    if "tiles" in name:  # [tiles of rows, tiles, 32, 4, 4] holds row 128 i + 32 b + a and block 4 j + c at [i, j, a, b, c]
        of_rows = scales.transpose(0, 3, 2, 1, 4).reshape(128 * len(scales), 4 * scales.shape[1])
        scales = np.array([of_rows[128 * received.tile_offsets[group] + position] for group, position in groups])
        scales = scales.reshape(len(groups), of_rows.shape[1])
    assert len(scales) == len(values)
    block = 128 if name.startswith("fp8") else 16 if name.startswith("nvfp4") else 32
    if scales.dtype != np.float32:
        kind = ml_dtypes.float8_e4m3fn if block == 16 else ml_dtypes.float8_e8m0fnu
        scales = np.ascontiguousarray(scales).view(np.uint8).view(kind).astype(np.float32)
    decoded = values * np.repeat(scales, block, 1)[:, :hidden]
    return decoded * others[1].reshape(-1, 1) if len(others) > 1 else decoded


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32", "fp8", "fp8-columns", "fp8-pow2", "mxfp8", "mxfp8-tiles", "mxfp4", "mxfp4-columns", "nvfp4",
                                  "nvfp4-columns", "nvfp4-tiles", "nvfp4-token", "nvfp4-token-columns", "nvfp4-token-tiles"])
def test_the_parts_of_every_format_decode_to_the_tokens(rng, name, split):
    hidden = 96
    step = random_step(rng, 3, experts=7, top_k=2, hidden=hidden, most=9)
    for tokens in step.tokens:
        tokens *= bf16(2.0) ** rng.integers(-3, 1) if name.startswith("nvfp4") else bf16(2.0) ** rng.integers(-9, 9, (len(tokens), 1))
    if name.startswith("nvfp4-token"):  # a row in 1,024 times the size of its neighbour
        for tokens in step.tokens:
            tokens[1::2] *= bf16(1024)

    if name in ("fp16", "fp32"):
        step.tokens = [tokens.astype(np.float16 if name == "fp16" else np.float32) for tokens in step.tokens]

    def body(rank):
        exchange = ferry.max.Exchange(rank, experts=7, top_k=2, hidden=hidden, max_tokens=9, format=name)
        given = {"global_scale": 2.0**-8} if name.startswith("nvfp4") and "token" not in name else {}
        if split:
            exchange.ep_dispatch_async(step.tokens[rank.index], step.ids[rank.index], **given)
            received = exchange.ep_dispatch_wait()
        else:
            received = exchange.ep_fused_dispatch(step.tokens[rank.index], step.ids[rank.index], **given)
        expected, offsets, ids, *_ = expected_dispatch(step, rank.index)
        groups = [(group, row - begin) for group, begin, end in zip(ids, offsets, offsets[1:]) for row in range(begin, end)]
        got = decoded(received, name, hidden, groups) * np.float32(given.get("global_scale", 1))
        expected = expected.astype(np.float32)
        assert got.shape == expected.shape
        assert (np.abs(got - expected) <= 0.26 * np.abs(expected).max(1, initial=0, keepdims=True)).all()
        assert received.output_tokens is received.parts[0]
        assert received.output_scales is (received.parts[1] if len(received.parts) > 1 else None)
        assert (received.tile_offsets is not None) == ("tiles" in name)
        # Every part has as many rows as there are; a group's tiles hold 128 of its rows each.
        tiles = np.cumsum([0] + [-(-count // 128) for count in received.counts.sum(1)])
        if "tiles" in name:
            assert received.tile_offsets.tolist() == tiles.tolist()
        for index, part in enumerate(received.parts):
            assert len(part) == (tiles[-1] if "tiles" in name and index == 1 else len(expected))

    ferry.Group.threads(3).run(body)


def test_raw_parts_are_all_received(rng):
    step = random_step(rng, 3, experts=7, top_k=2, hidden=16, most=9)
    parts = [(rng.integers(0, 256, (len(x), 32)).astype(np.uint8), rng.random((len(x), 4), np.float32)) for x in step.tokens]

    def body(rank):
        exchange = ferry.max.Exchange(rank, experts=7, top_k=2, hidden=16, max_tokens=9, format="raw:32+16")
        received = exchange.ep_fused_dispatch(parts[rank.index], step.ids[rank.index])
        routes = routes_to(step, rank.index)
        assert len(received.parts) == 2 and received.output_tokens is received.parts[0] and received.output_scales is None
        for got, sent, columns in zip(received.parts, zip(*parts), (32, 4)):
            assert same_bits(got, np.array([sent[source][token] for _, source, token, _ in routes], got.dtype).reshape(-1, columns))

    ferry.Group.threads(3).run(body)


@pytest.mark.parametrize("name, parts", [("fp8", 1), ("mxfp8", 2), ("nvfp4", 2)])
def test_input_scales_encode_the_rows_of_each_expert(rng, name, parts):
    hidden = 64
    step = random_step(rng, 3, experts=7, top_k=2, hidden=hidden, most=9)
    scales = (rng.uniform(0.02, 0.1, 7) * (1 if name == "fp8" else 0.1)).astype(np.float32)

    def body(rank):
        exchange = ferry.max.Exchange(rank, experts=7, top_k=2, hidden=hidden, max_tokens=9)  # bf16, as the tokens travel
        received = exchange.ep_fused_dispatch(step.tokens[rank.index], step.ids[rank.index], format=name, input_scales=scales)
        assert len(received.parts) == parts
        expected = expected_dispatch(step, rank.index)[0].astype(np.float32)
        of_row = np.array([scales[expert] for expert, *_ in routes_to(step, rank.index)], np.float32).reshape(-1, 1)
        got = decoded(received, name, hidden, None) * of_row
        assert got.shape == expected.shape
        assert (np.abs(got - expected) <= 0.26 * np.abs(expected).max(1, initial=0, keepdims=True)).all()

    ferry.Group.threads(3).run(body)
