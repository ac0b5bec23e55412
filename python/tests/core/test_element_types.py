"""Received elements and scales are those of ml_dtypes: e4m3, e2m1 and e8m0."""

import ml_dtypes
import numpy as np
import pytest

import ferry
from oracle import bf16

if not hasattr(ml_dtypes, "float4_e2m1fn"):
    pytest.skip("this ml_dtypes has no float4_e2m1fn", allow_module_level=True)

E4M3, E2M1, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu
HIDDEN = 512


def tokens_of(rng):
    """Every bf16 value once: in order, so that a block has neighbours, and in any order."""
    values = np.arange(65536, dtype=np.uint16)
    return np.concatenate([values, rng.permutation(values)]).reshape(-1, HIDDEN).view(bf16)


def received(tokens, form, **options):
    def body(rank):
        with ferry.Exchange(rank, experts=1, top_k=1, hidden=HIDDEN, max_tokens=len(tokens), format=form) as exchange:
            rows = exchange.dispatch(tokens, np.zeros((len(tokens), 1), np.int64), **options)
            return [np.asarray(part[: len(tokens)]).copy() for part in rows.parts]

    return ferry.Group.threads(1).run(body)[0]


def codes_of(values, element, largest):
    """By ml_dtypes, which has its own idea of what is out of range: that is cut before, and NaN put in after."""
    with np.errstate(invalid="ignore"):
        codes = np.clip(np.nan_to_num(values, nan=0, posinf=largest, neginf=-largest), -largest, largest).astype(element).view(np.uint8)
    return np.where(np.isnan(values), 0x7F if element == E4M3 else 7, codes)


def blocks_of(tokens, columns):
    x = tokens.astype(np.float32).reshape(len(tokens), -1, columns)
    return x, np.max(np.where(np.isnan(x), 0, np.abs(x)), axis=2)


def unpacked(values):
    return np.stack([values & 15, values >> 4], axis=-1).reshape(len(values), -1)


@pytest.mark.parametrize("form", ["mxfp8-ocp", "mxfp8-up", "mxfp4-ocp", "mxfp4-up"])
def test_mx_elements(rng, form):
    tokens = tokens_of(rng)
    values, scales = received(tokens, form)
    x, largest = blocks_of(tokens, 32)
    element, most, top = (E4M3, 448, 8) if form.startswith("mxfp8") else (E2M1, 6, 2)
    scale = np.ascontiguousarray(scales).view(np.uint8)[:, : x.shape[1]].view(E8M0).astype(np.float64)
    fraction, exponent = np.frexp(np.where(np.isinf(largest), 1, largest).astype(np.float64))
    up = form.endswith("up") & (2 * fraction > (1.75 if top == 8 else 1.5))
    expected = np.clip(exponent - 1 - top + up, -127, 127)
    expected = np.where(largest == 0, -127, np.where(np.isinf(largest), 127, expected))
    assert (scale == np.exp2(expected.astype(np.float64))).all()
    with np.errstate(invalid="ignore"):
        quotients = x.astype(np.float64) / scale[:, :, None]
    codes = np.ascontiguousarray(values).view(np.uint8)
    codes = codes if top == 8 else unpacked(codes)
    assert (codes.reshape(x.shape) == codes_of(quotients, element, most)).all()


@pytest.mark.parametrize("g", [1.0, 0.37, 2.0**-20])
def test_nvfp4_elements(rng, g):
    tokens = tokens_of(rng)
    g = np.float32(g)
    values, scales = received(tokens, "nvfp4", global_scale=np.array([g], np.float32))
    x, largest = blocks_of(tokens, 16)
    with np.errstate(over="ignore"):
        t = largest / np.float32(6) / g
    expected = codes_of(t, E4M3, 448).astype(np.uint8)
    assert (np.ascontiguousarray(scales).view(np.uint8)[:, : x.shape[1]] == expected).all()
    divisor = expected.view(E4M3).astype(np.float32) * g
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        codes = codes_of(x / divisor[:, :, None], E2M1, 6)
    codes = np.where(divisor[:, :, None] == 0, 0, codes)
    assert (unpacked(np.ascontiguousarray(values).view(np.uint8)).reshape(x.shape) == codes).all()
