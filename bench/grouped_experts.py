"""SwiGLU experts as two grouped matrix products in Triton that read the groups' offsets on the device.

The first takes fp8 rows with a scale for each 128 columns, as dispatch delivers them, and fp8 weights with a scale for each
128 x 128 block; the second is in bf16. Every row's sums are added in the same order whatever rows stand beside it: a row's
bits do not depend on the batch.
"""

import os

import torch
import triton
import triton.language as tl

SCALED = 128  # columns of a scale
ROWS, COLUMNS = 128, 64  # of a tile of the first product
OUT_COLUMNS, DEPTH = 128, 64  # of a tile of the second
STEP = 32  # the number of inner columns is a multiple of this
INTERPRETED = "TRITON_INTERPRET" in os.environ


@triton.jit
def gate_up_kernel(x, x_scales, gate, up, gate_scales, up_scales, offsets, inner_rows, groups, inner, weight_stride, scale_rows,
                   HIDDEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, INTERPRETED: tl.constexpr):
    blocks: tl.constexpr = HIDDEN // BK
    tile = tl.program_id(0)
    before = 0  # tiles of the groups before this one
    across = tl.cdiv(inner, BN)
    for group in range(groups):
        first = tl.load(offsets + group)
        end = tl.load(offsets + group + 1)
        tiles = tl.cdiv(end - first, BM) * across
        while tile < before + tiles:
            down_at = (tile - before) // across
            right_at = (tile - before) % across
            rows = first + down_at * BM + tl.arange(0, BM)
            columns = right_at * BN + tl.arange(0, BN)
            depth = tl.arange(0, BK)
            row_mask = rows < end
            x_at = x + rows[:, None].to(tl.int64) * HIDDEN + depth[None, :]
            weight_at = columns[None, :].to(tl.int64) * HIDDEN + depth[:, None]
            scale_at = right_at * BN // BK * blocks
            gates = tl.zeros((BM, BN), dtype=tl.float32)
            ups = tl.zeros((BM, BN), dtype=tl.float32)
            for block in range(blocks):
                values = tl.load(x_at + block * BK, mask=row_mask[:, None], other=0.0)
                scales = tl.load(x_scales + rows.to(tl.int64) * blocks + block, mask=row_mask, other=0.0)
                gate_scale = tl.load(gate_scales + scale_at + block)
                up_scale = tl.load(up_scales + scale_at + block)
                gate_weights = tl.load(gate + weight_at + block * BK)
                up_weights = tl.load(up + weight_at + block * BK)
                if INTERPRETED:  # Triton's interpreter multiplies fp32 only
                    values = values.to(tl.float32)
                    gate_weights = gate_weights.to(tl.float32)
                    up_weights = up_weights.to(tl.float32)
                gates += tl.dot(values, gate_weights) * (scales * gate_scale)[:, None]
                ups += tl.dot(values, up_weights) * (scales * up_scale)[:, None]
            made = gates / (1 + tl.exp(-gates)) * ups
            made_at = inner_rows + rows[:, None].to(tl.int64) * inner + columns[None, :]
            tl.store(made_at, made.to(tl.bfloat16), mask=row_mask[:, None] & (columns < inner)[None, :])
            tile += tl.num_programs(0)
        before += tiles
        gate += weight_stride
        up += weight_stride
        gate_scales += scale_rows * blocks
        up_scales += scale_rows * blocks


@triton.jit
def down_kernel(inner_rows, down, offsets, out, groups, inner, weight_stride, row_stride,
                HIDDEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, INTERPRETED: tl.constexpr):
    across: tl.constexpr = HIDDEN // BN
    tile = tl.program_id(0)
    before = 0
    for group in range(groups):
        first = tl.load(offsets + group)
        end = tl.load(offsets + group + 1)
        tiles = tl.cdiv(end - first, BM) * across
        while tile < before + tiles:
            rows = first + (tile - before) // across * BM + tl.arange(0, BM)
            columns = (tile - before) % across * BN + tl.arange(0, BN)
            depth = tl.arange(0, BK)
            row_mask = rows < end
            row_at = inner_rows + rows[:, None].to(tl.int64) * inner + depth[None, :]
            weight_at = down + columns[None, :].to(tl.int64) * row_stride + depth[:, None]
            sums = tl.zeros((BM, BN), dtype=tl.float32)
            for block in range(tl.cdiv(inner, BK)):
                in_row = block * BK + depth < inner
                values = tl.load(row_at + block * BK, mask=row_mask[:, None] & in_row[None, :], other=0.0)
                weights = tl.load(weight_at + block * BK)
                if INTERPRETED:
                    values = values.to(tl.float32)
                    weights = weights.to(tl.float32)
                sums += tl.dot(values, weights)
            out_at = out + rows[:, None].to(tl.int64) * HIDDEN + columns[None, :]
            tl.store(out_at, sums.to(tl.bfloat16), mask=row_mask[:, None])
            tile += tl.num_programs(0)
        before += tiles
        down += weight_stride


class GroupedExperts:
    """The experts of a rank, with random weights for up to `most_inner` inner columns, of which `inner` are used."""

    def __init__(self, experts, hidden, most_inner, device, seed):
        assert hidden % SCALED == 0 and most_inner % SCALED == 0
        self.experts, self.hidden, self.most_inner, self.inner = experts, hidden, most_inner, most_inner
        generator = torch.Generator(device).manual_seed(seed)

        def weights(rows, columns, dtype):
            made = torch.empty(experts, rows, columns, dtype=dtype, device=device)
            for expert in made:  # one by one, because randn makes them in fp32
                expert.copy_(torch.randn(rows, columns, generator=generator, device=device) * (1 if dtype != torch.bfloat16 else 0.02))
            return made

        def scales():
            shape = (experts, most_inner // SCALED, hidden // SCALED)
            return torch.rand(shape, generator=generator, device=device) * 0.02 + 0.01

        self.gate, self.up = (weights(most_inner, hidden, torch.float8_e4m3fn) for _ in range(2))
        self.down = weights(hidden, most_inner, torch.bfloat16)
        self.gate_scales, self.up_scales = scales(), scales()

    def set_inner(self, inner):
        assert 0 < inner <= self.most_inner and inner % STEP == 0
        self.inner = inner

    def run(self, received, inner_rows, out, blocks):
        """Enqueues both products, each with `blocks` thread blocks; returns `out` [rows, hidden]."""
        offsets = received.row_offsets
        gate_up_kernel[(blocks,)](
            received.data, received.scales, self.gate, self.up, self.gate_scales, self.up_scales, offsets, inner_rows,
            self.experts, self.inner, self.gate.stride(0), self.gate_scales.shape[1],
            HIDDEN=self.hidden, BM=ROWS, BN=COLUMNS, BK=SCALED, INTERPRETED=INTERPRETED, num_warps=8, num_stages=4)
        down_kernel[(blocks,)](
            inner_rows, self.down, offsets, out, self.experts, self.inner, self.down.stride(0), self.down.stride(1),
            HIDDEN=self.hidden, BM=ROWS, BN=OUT_COLUMNS, BK=DEPTH, INTERPRETED=INTERPRETED, num_warps=8, num_stages=4)
        return out

    def reference(self, values, scales, group):
        """The same for a few rows of one group, in fp32."""
        def decoded(codes, of_blocks):
            return codes.float() * of_blocks.repeat_interleave(SCALED, dim=-1)

        def weight(codes, of_blocks):
            return decoded(codes[group][:self.inner], of_blocks[group].repeat_interleave(SCALED, dim=0)[:self.inner])

        x = decoded(values, scales)
        gates, ups = x @ weight(self.gate, self.gate_scales).T, x @ weight(self.up, self.up_scales).T
        made = (gates * torch.sigmoid(gates) * ups).bfloat16().float()
        return made @ self.down[group][:, :self.inner].float().T
