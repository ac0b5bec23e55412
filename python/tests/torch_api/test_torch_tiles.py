"""cuBLASLt, by way of PyTorch, multiplies received rows by their scales as they lie in tiles. Needs a GPU of compute capability 10 or more."""

import math

import pytest

torch = pytest.importorskip("torch")

import numpy as np

import ferry

HIDDEN, OUTPUTS, EXPERTS, TOP_K, TOKENS = 256, 128, 4, 2, 150
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def has_block_scaling():
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)


def decoded_e2m1(codes):
    """[rows, H / 2] bytes to [rows, H] values: the even column in the low four bits."""
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
    return E2M1.to(codes.device)[nibbles & 7] * torch.where(nibbles >= 8, -1.0, 1.0)


def of_rows(tiles):
    """Scales [tiles of rows, tiles, 32, 4, 4] as [rows, blocks]."""
    tall, wide = tiles.shape[:2]
    return tiles.permute(0, 3, 2, 1, 4).reshape(128 * tall, 4 * wide)


def as_tiles(scales):
    """[rows, blocks] bytes as cuBLAS documents them: tiles of 128 rows x 4 blocks, 32 lines of 16 bytes each."""
    tall, wide = math.ceil(scales.shape[0] / 128), math.ceil(scales.shape[1] / 4)
    padded = torch.zeros(128 * tall, 4 * wide, dtype=torch.uint8, device=scales.device)
    padded[: scales.shape[0], : scales.shape[1]] = scales
    return padded.reshape(tall, 4, 32, wide, 4).permute(0, 3, 2, 1, 4).contiguous()


def decoded(name, values, scales):
    """Values of rows, without the scale of the call."""
    if name == "mxfp8":
        elements, factors, block = values.view(torch.float8_e4m3fn).float(), torch.exp2(scales.float() - 127), 32
    else:
        elements, factors, block = decoded_e2m1(values), scales.view(torch.float8_e4m3fn).float(), 16
    return elements * factors.repeat_interleave(block, 1)[: len(elements), : elements.shape[1]]


def test_tiles_hold_what_cublas_documents():
    scales = torch.arange(130 * 6, dtype=torch.int64).reshape(130, 6).remainder(251).to(torch.uint8)
    flat, wide = as_tiles(scales).flatten(), 2
    for row in (0, 1, 31, 32, 95, 127, 128, 129):
        for block in range(6):
            at = 512 * (row // 128 * wide + block // 4) + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
            assert flat[at] == scales[row, block]
    assert torch.equal(of_rows(as_tiles(scales))[:130, :6], scales)


@pytest.mark.skipif(not has_block_scaling(), reason="needs a GPU with block-scaled matrix units (compute capability 10)")
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_cublaslt_consumes_received_tiles(rng, name):
    device = torch.device("cuda", 0)
    ids = torch.from_numpy(np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)])).to(device)
    tokens = torch.from_numpy(rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32)).to(device, torch.bfloat16)
    scale_of_call = torch.full((1,), 1.0 if name == "mxfp8" else 0.01, device=device)
    options = {} if name == "mxfp8" else {"global_scale": scale_of_call}
    element, scale = ((torch.float8_e4m3fn, torch.float8_e8m0fnu) if name == "mxfp8"
                      else (torch.float4_e2m1fn_x2, torch.float8_e4m3fn))
    blocks = HIDDEN // (32 if name == "mxfp8" else 16)

    def body(rank):
        exchange = ferry.Exchange(rank, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS, format=f"{name}-tiles",
                                  backend="cuda")
        rows = exchange.dispatch(tokens, ids, **options)
        exchange.synchronize()
        values = rows.data.view(torch.uint8).reshape(-1, rows.data.shape[-1])
        for group in range(EXPERTS):
            first, count = int(rows.row_offsets[group]), int(rows.counts[group])
            tile = int(rows.tile_offsets[group])
            tiles = rows.scales[tile : tile + math.ceil(count / 128)].view(torch.uint8)
            a = values[first : first + count]
            # Weights of the same format, with random codes and scales near 1.
            b = torch.from_numpy(rng.integers(0, 100, (OUTPUTS, values.shape[1]), dtype=np.uint8)).to(device)
            b_scales = torch.full((OUTPUTS, blocks), 127 if name == "mxfp8" else 0x38, dtype=torch.uint8, device=device)
            got = torch._scaled_mm(a.view(element), b.view(element).t(), tiles.flatten().view(scale),
                                   as_tiles(b_scales).flatten().view(scale), out_dtype=torch.bfloat16)
            expected = decoded(name, a, of_rows(tiles)[:count]) @ decoded(name, b, b_scales).t()
            difference = torch.linalg.norm(got.float() - expected) / torch.linalg.norm(expected)
            assert difference < 1e-2, f"group {group}: {difference}"

    ferry.Group.threads(1).run(body)
