// Quantising a row to fp8 while it is sent: by one warp, into its stage, as the message will hold it.
#pragma once

#include "cuda/dispatch.hpp"
#include "cuda/stage.cuh"
#include "cuda/values.cuh"
#include "format/fp8_block.hpp"

namespace ferry::cuda {

// Blocks are encoded in runs of 16: a run's scales, packed or not, are a multiple of 16 bytes.
inline constexpr int kRunBlocks = 16;
inline constexpr int kRunColumns = kRunBlocks * static_cast<int>(kFp8Block);
inline constexpr int kRunsAtOnce = kStageBytes / (kRunColumns + 4 * kRunBlocks);

// What of a message a stage holds.
struct EncodedRuns {
  std::int64_t first_column;
  std::uint32_t value_bytes;
  std::int64_t scales_at;  // offset in the scales part
  std::uint32_t scale_bytes;
  std::uint32_t scales_in_stage;
};

__device__ inline int runs_of(std::int64_t hidden) {
  return static_cast<int>((hidden + kRunColumns - 1) / kRunColumns);
}

// Bytes [begin, end) of the scales part that runs [first, last) fill: up to the part's end for the last run.
__device__ inline EncodedRuns encoded_runs(const DispatchArguments& call, int first, int last) {
  const std::int64_t hidden = call.lane.hidden, column = std::int64_t{first} * kRunColumns;
  const std::int64_t end = min(hidden, std::int64_t{last} * kRunColumns);
  const std::int64_t scale_run = call.fp8.packed ? kRunBlocks : 4 * kRunBlocks;
  const std::int64_t scales_begin = first * scale_run;
  const std::int64_t scales_end = min(call.parts.part[1].wire_bytes, last * scale_run);
  EncodedRuns runs;
  runs.first_column = column;
  runs.value_bytes = static_cast<std::uint32_t>(end - column);
  runs.scales_at = scales_begin;
  runs.scale_bytes = static_cast<std::uint32_t>(scales_end - scales_begin);
  runs.scales_in_stage = runs.value_bytes;
  return runs;
}

// Largest magnitude among the 16 threads of a block's half warp, NaN ignored.
__device__ __forceinline__ float largest_of_block(const float (&x)[8]) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(x[i]));
#pragma unroll
  for (int step = 8; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  return largest;
}

// By half a warp: 128 values, 8 a thread, to the stage; the half's first thread stores their scale.
__device__ __forceinline__ void encode_block(const DispatchArguments& call, const float (&x)[8],
                                             std::byte* values, std::byte* scales, int block) {
  const Fp8Scale scale = fp8_scale(largest_of_block(x), call.fp8.power_of_two);
  std::uint32_t two[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    two[i] = two_to_e4m3(__fmul_rn(x[2 * i], scale.factor), __fmul_rn(x[2 * i + 1], scale.factor));
  if (values != nullptr)
    *reinterpret_cast<uint2*>(values) = make_uint2(two[0] | two[1] << 16, two[2] | two[3] << 16);
  if (scales == nullptr) return;
  if (call.fp8.packed) {
    reinterpret_cast<std::uint8_t*>(scales)[block] = packed_scale(scale.scale);
  } else {
    reinterpret_cast<float*>(scales)[block] = scale.scale;
  }
}

// By a whole warp: the blocks of `runs` of the row, to its stage. The stage is free.
__device__ inline void encode_runs(const DispatchArguments& call, const std::byte* row,
                                   const EncodedRuns& runs, std::byte* stage) {
  constexpr int kDeep = 4;
  const int thread = threadIdx.x % 32, half = thread / 16, within = thread % 16;
  std::byte* scales = stage + runs.scales_in_stage;
  for (std::uint32_t i = 4 * thread; i < runs.scale_bytes; i += 128)
    *reinterpret_cast<std::uint32_t*>(scales + i) = 0;
  __syncwarp();
  const int blocks = static_cast<int>((runs.value_bytes + kFp8Block - 1) / kFp8Block);
  for (int first = 0; first < blocks; first += 2 * kDeep) {
    RawEight raw[kDeep];
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      const std::int64_t at = (first + 2 * d + half) * kFp8Block + 8 * within;
      if (at < runs.value_bytes) raw[d] = load_eight(call.type, row, runs.first_column + at);
    }
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      const int block = first + 2 * d + half;
      const std::int64_t at = block * kFp8Block + 8 * within;
      const bool inside = at < runs.value_bytes;
      float x[8] = {};
      if (inside) unpack(call.type, raw[d], x);
      encode_block(call, x, inside ? stage + at : nullptr, within == 0 && block < blocks ? scales : nullptr,
                   block);
    }
  }
  // Each thread: its stores to shared memory before the copy engine's reads of them.
  fence_before_bulk();
  __syncwarp();
}

}  // namespace ferry::cuda
