"""What every format makes of a row, by loops over its blocks written from docs/formats.md."""

import math

import ml_dtypes
import numpy as np

FORMATS = (
    ["bf16", "fp16", "fp32"]
    + [f"fp8{columns}{scales}" for columns in ("", "-columns") for scales in ("", "-pow2", "-pow2-packed")]
    + [f"{mx}{rule}{order}" for mx in ("mxfp8", "mxfp4") for rule in ("", "-up", "-ocp") for order in ("", "-columns", "-tiles")]
    + [f"nvfp4{token}{order}" for token in ("", "-token") for order in ("", "-columns", "-tiles")])
TYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}
F = np.float32
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def e4m3(x):
    """Codes, as uint8."""
    return np.clip(x, F(-448), F(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def e4m3_value(code):
    return np.array(code, np.uint8).view(ml_dtypes.float8_e4m3fn).astype(F)


def e2m1(x):
    """Codes, as uint8: the nearest value, ties to the even code."""
    codes = np.zeros(len(x), np.uint8)
    for i, value in enumerate(np.abs(x).tolist()):
        distance = [abs(value - each) if value < 6 else 6 - each for each in E2M1]
        codes[i] = min(range(8), key=lambda code: (distance[code], code % 2))
    return codes | np.signbit(x).astype(np.uint8) << 3


def exponent_of(amax):
    """k and m of amax = m * 2^k, 1 <= m < 2."""
    fraction, exponent = math.frexp(float(amax))
    return exponent - 1, 2 * fraction


def fp8_block(name, x):
    s = max(np.abs(x).max(), F(1e-4))
    if "pow2" not in name:
        return e4m3(x * (F(448) / s)), s / F(448)
    fraction, exponent = math.frexp(float(s / F(448)))
    scale = F(2.0 ** (exponent - 1 if fraction == 0.5 else exponent))
    return e4m3(x * (F(1) / scale)), scale


def mx_block(name, x):
    """Codes and the scale's byte."""
    four = name.startswith("mxfp4")
    rule = "up" if "-up" in name else "ocp" if "-ocp" in name or four else "up"
    amax, e = np.abs(x).max(), -127
    if amax > 0:
        k, m = exponent_of(amax)
        e = k - (2 if four else 8) + (rule == "up" and m > (1.5 if four else 1.75))
    e = min(max(e, -127), 127)
    return (e2m1 if four else e4m3)(x * F(2.0**-e)), e + 127


def nvfp4_block(x, g):
    with np.errstate(over="ignore"):
        s = e4m3(np.array([np.abs(x).max() / F(6) / g]))
    d = e4m3_value(s)[0] * g
    return e2m1(x / d) if d != 0 else np.zeros(len(x), np.uint8), int(s[0])


def encode(name, row, g):
    """(values, scales, g): of a float32 row. Scales are float32 or bytes; the g of the row with nvfp4."""
    base, _, options = name.partition("-")
    block = {"fp8": 128, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}[base]
    if "token" in options:
        g = max(np.abs(row).max() / F(2688), F(2.0**-126))
    blocks = [row[at : at + block] for at in range(0, len(row), block)]
    made = [fp8_block(name, x) if base == "fp8" else nvfp4_block(x, g) if base == "nvfp4" else mx_block(name, x) for x in blocks]
    codes = np.concatenate([codes for codes, _ in made])
    if base.endswith("fp4"):
        codes = codes[::2] | codes[1::2] << 4
    scales = [scale for _, scale in made]
    if base == "fp8" and "packed" not in options:
        return codes, np.array(scales, F), g
    if base == "fp8":
        scales = [exponent_of(scale)[0] + 127 for scale in scales]
    return codes, np.array(scales + [0] * (-len(scales) % 4), np.uint8), g


def parts_of_row(name, row, g=F(1)):
    """The bytes of each part of a row in a format, scales as if they lay in rows; `row` of the token's type.

    With "*" encoded by the scale g of the row's expert.
    """
    if name in TYPES:
        return [row.tobytes()]
    row = row.astype(F)
    if name == "fp8*":
        return [e4m3(row / g).tobytes()]
    if name == "mxfp8*":
        row = row / g
    values, scales, g = encode(name.rstrip("*"), row, g)
    return [values.tobytes(), scales.tobytes()] + ([F(g).tobytes()] if "token" in name else [])


def received_parts(name, parts, row, tile_row):
    """The same of received parts. `tile_row`: the row's place, 128 times its group's first row of tiles and its position."""
    found = [np.ascontiguousarray(part[row]).tobytes() for index, part in enumerate(parts) if index != 1 or "tiles" not in name]
    if "tiles" in name:
        i, b, a = tile_row // 128, tile_row % 128 // 32, tile_row % 32
        found.insert(1, b"".join(np.ascontiguousarray(parts[1][i, j, a, b]).tobytes() for j in range(parts[1].shape[1])))
    elif len(found) > 1 and parts[1].dtype.itemsize == 1:
        found[1] += bytes(-len(found[1]) % 4)
    return found
