// Quantising to fp8 while a row is sent.
#pragma once

#include "backends/cuda/device/values.cuh"
#include "backends/cuda/dispatch/dispatch.hpp"
#include "backends/cuda/dispatch/row_copy.cuh"
#include "format/fp8_block.hpp"

namespace ferry::cuda {

// The columns that some quarters of a quantised row are: quarters begin at whole words of packed scales.
__device__ __forceinline__ ByteRange encoded_columns(const LaneView& lane, const Quarters& quarters) {
  return ByteRange::of(quarters, lane.hidden, 4 * static_cast<int>(kFp8Block));
}

// Two 16-bit values to a word: the larger magnitude of each half; NaN only if both are.
template <DType kType>
__device__ __forceinline__ std::uint32_t larger_two(std::uint32_t a, std::uint32_t b) {
  static_assert(kType != DType::fp32);
  return kType == DType::bf16 ? max_bf16x2(a & 0x7fff7fff, b & 0x7fff7fff)
                              : max_fp16x2(a & 0x7fff7fff, b & 0x7fff7fff);
}

// By a whole warp, of accesses of 256 columns each, 8 a thread: the largest magnitude, NaN ignored, of block
// `thread` of their 2 * kDeep blocks of 128.
template <DType kType, int kDeep>
__device__ __forceinline__ float largest_of_block(const RawEight (&raw)[kDeep]) {
  static_assert(2 * kDeep <= 32 && kDeep % 2 == 0);
  const int thread = threadIdx.x % 32;
  float largest = 0;
  if constexpr (kType == DType::fp32) {
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      float x[8], most = 0;
      unpack(kType, raw[d], x);
#pragma unroll
      for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(x[i]));
#pragma unroll
      for (int step = 8; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
      const float of_half = __shfl_sync(~0u, most, 16 * (thread % 2));
      if (thread / 2 == d) largest = of_half;
    }
  } else {
    // Two accesses in one word: their values need not be unpacked to be compared.
#pragma unroll
    for (int d = 0; d < kDeep; d += 2) {
      std::uint32_t both[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4& of = raw[d + i].low;
        both[i] = larger_two<kType>(larger_two<kType>(of.x, of.y), larger_two<kType>(of.z, of.w));
      }
      std::uint32_t most =
          larger_two<kType>(__byte_perm(both[0], both[1], 0x5410), __byte_perm(both[0], both[1], 0x7632));
#pragma unroll
      for (int step = 8; step > 0; step /= 2)
        most = larger_two<kType>(most, __shfl_xor_sync(~0u, most, step));
      most = __shfl_sync(~0u, most, 16 * (thread % 2));
      if (thread / 4 == d / 2) largest = value_of<kType>(most, thread / 2 % 2);
    }
  }
  return largest == largest ? largest : 0.0f;
}

__device__ __forceinline__ uint2 encode_eight(const float (&x)[8], float factor) {
  std::uint32_t two[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    two[i] = two_to_e4m3(__fmul_rn(x[2 * i], factor), __fmul_rn(x[2 * i + 1], factor));
  return make_uint2(two[0] | two[1] << 16, two[2] | two[3] << 16);
}

// By a whole warp: the 4 bytes that the scales' part has at this thread's block, or packed at it and the
// three after it; bytes of threads that have none (`has`) are 0.
__device__ __forceinline__ std::uint32_t scale_word(const Fp8Options& options, bool has, float scale) {
  if (!options.packed) return __float_as_uint(scale);
  const int thread = threadIdx.x % 32;
  std::uint32_t word = has ? std::uint32_t{packed_scale(scale)} << (8 * (thread % 4)) : 0;
  word |= __shfl_xor_sync(~0u, word, 1);
  word |= __shfl_xor_sync(~0u, word, 2);
  return word;
}

}  // namespace ferry::cuda
