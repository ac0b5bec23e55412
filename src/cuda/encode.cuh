// Quantising to fp8 while a row is sent.
#pragma once

#include "cuda/dispatch.hpp"
#include "cuda/values.cuh"
#include "format/fp8_block.hpp"

namespace ferry::cuda {

// Largest magnitude among the 16 threads of a block's half warp, NaN ignored.
__device__ __forceinline__ float largest_of_block(const float (&x)[8]) {
  float largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(x[i]));
#pragma unroll
  for (int step = 8; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  return largest;
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
