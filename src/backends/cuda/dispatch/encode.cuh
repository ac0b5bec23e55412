// Quantises rows to fp8 while they are sent.
#pragma once

#include "backends/cuda/device/row_copy.cuh"
#include "backends/cuda/device/values.cuh"
#include "backends/cuda/dispatch/dispatch.hpp"
#include "format/blocks.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

// The columns of some quarters of a quantised row. Quarters begin at multiples of four scale blocks, so that
// the packed scales of a quarter are whole words.
__device__ __forceinline__ ByteRange encoded_columns(const LaneView& lane, const Quarters& quarters) {
  return ByteRange::of(quarters, lane.hidden, 4 * kFp8Block);
}

// The larger magnitude of each pair, of two pairs of 16-bit values, with either sign: magnitude_in() reads
// it. NaN only if both are NaN.
template <DType kType>
__device__ __forceinline__ std::uint32_t max_magnitude_x2(std::uint32_t a, std::uint32_t b) {
  static_assert(kType != DType::fp32);
  return kType == DType::bf16 ? max_magnitude_bf16x2(a, b) : max_magnitude_fp16x2(a, b);
}

// The magnitude in the low (0) or the high half of such a pair.
template <DType kType>
__device__ __forceinline__ float magnitude_in(std::uint32_t pair, int half) {
  return fabsf(value_of<kType>(pair, half));
}

// The largest magnitude of this thread's eight 16-bit values in each of two accesses, in the low and the high
// half, with either sign.
template <DType kType>
__device__ __forceinline__ std::uint32_t max_of_two_accesses(const uint4& low, const uint4& high) {
  const auto most = [](const uint4& of) {
    return max_magnitude_x2<kType>(max_magnitude_x2<kType>(of.x, of.y), max_magnitude_x2<kType>(of.z, of.w));
  };
  const std::uint32_t a = most(low), b = most(high);
  return max_magnitude_x2<kType>(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
}

// [warp] The largest magnitude of a block of 128 columns, NaN ignored. `raw`: kDeep accesses of 256 columns,
// 8 columns a thread. Thread t gets the result of block t of these 2 * kDeep blocks.
template <DType kType, int kDeep>
__device__ __forceinline__ float block_max_magnitude(const RawEight (&raw)[kDeep]) {
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
      const float half_max = __shfl_sync(~0u, most, 16 * (thread % 2));
      if (thread / 2 == d) largest = half_max;
    }
  } else {
    // Values of two accesses are compared in one word, without unpacking them.
#pragma unroll
    for (int d = 0; d < kDeep; d += 2) {
      std::uint32_t most = max_of_two_accesses<kType>(raw[d].low, raw[d + 1].low);
#pragma unroll
      for (int step = 8; step > 0; step /= 2)
        most = max_magnitude_x2<kType>(most, __shfl_xor_sync(~0u, most, step));
      most = __shfl_sync(~0u, most, 16 * (thread % 2));
      if (thread / 4 == d / 2) largest = magnitude_in<kType>(most, thread / 2 % 2);
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

// [warp] Four bytes of the part of scales: this thread's scale, or (packed) one byte from each of four
// threads, the first of which stores the word. Threads without a block (`has` false) contribute 0.
__device__ __forceinline__ std::uint32_t scale_word(const Encoding& encoding, bool has, float scale) {
  if (!encoding.packs_scales()) return __float_as_uint(scale);
  const int thread = threadIdx.x % 32;
  std::uint32_t word = has ? std::uint32_t{biased_exponent(scale)} << (8 * (thread % 4)) : 0;
  word |= __shfl_xor_sync(~0u, word, 1);
  word |= __shfl_xor_sync(~0u, word, 2);
  return word;
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
