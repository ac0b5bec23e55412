// Quantises rows to the microscaled formats, whose blocks are shorter than 128 columns and whose scales are
// bytes, while they are sent.
#pragma once

#include "backends/cuda/dispatch/destination.cuh"
#include "backends/cuda/dispatch/encode.cuh"
#include "format/e2m1.hpp"
#include "format/mx_block.hpp"

namespace ferry::cuda {

// The largest magnitude of a thread's 8 columns, NaN ignored.
template <DType kType>
__device__ __forceinline__ float max_magnitude_of_eight(const RawEight& raw) {
  if constexpr (kType == DType::fp32) {
    float x[8], most = 0;
    unpack(kType, raw, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(x[i]));
    return most;
  } else {
    const uint4& of = raw.low;
    const std::uint32_t most =
        max_magnitude_x2<kType>(max_magnitude_x2<kType>(of.x, of.y), max_magnitude_x2<kType>(of.z, of.w));
    return fmaxf(fmaxf(value_of<kType>(most, 0), value_of<kType>(most, 1)), 0.0f);
  }
}

// Eight columns as e2m1, the first in the lowest four bits.
__device__ __forceinline__ std::uint32_t eight_to_e2m1(const float (&x)[8], float factor) {
  std::uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) codes |= std::uint32_t{fp32_to_e2m1(__fmul_rn(x[i], factor))} << (4 * i);
  return codes;
}

// [warp] The scale bytes of an access of 256 columns as words: every 16 threads have four blocks of 32
// columns, and the first of them gets their word. `byte`: of this thread's block, 0 past the row's end.
__device__ __forceinline__ std::uint32_t mx_scale_word(std::uint32_t byte) {
  std::uint32_t word = byte << (8 * (threadIdx.x / 4 % 4));
  word |= __shfl_xor_sync(~0u, word, 4);
  word |= __shfl_xor_sync(~0u, word, 8);
  return word;
}

// [warp] As send_encoded(), for the MX formats: four threads have a block of 32 columns.
template <DType kType, int kDeep, class StoreScales>
__device__ __forceinline__ void send_mx(const std::byte* row, std::byte* to_row, std::uint32_t rows,
                                        ByteRange columns, Encoding encoding, StoreScales store_scales) {
  const int thread = threadIdx.x % 32;
  const bool narrow = encoding.element == ElementType::e2m1;
#pragma unroll 1
  for (int first = columns.begin; first < columns.end; first += kDeep * 256) {
    RawEight raw[kDeep] = {};
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      const int column = first + 256 * d + 8 * thread;
      if (column < columns.end) raw[d] = load_eight(kType, row, column);
    }
    uint2 values[kDeep];
    std::uint32_t scales[kDeep];
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      float most = max_magnitude_of_eight<kType>(raw[d]);
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const BlockScale scale = mx_scale(most, encoding.rule, encoding.element);
      float x[8];
      unpack(kType, raw[d], x);
      values[d] = narrow ? make_uint2(eight_to_e2m1(x, scale.factor), 0) : encode_eight(x, scale.factor);
      const bool has = first + 256 * d + thread / 4 * kMxBlock < columns.end;
      scales[d] = mx_scale_word(has ? biased_exponent(scale.scale) : 0);
    }
    Destination::for_each(rows, to_row, [&](std::byte* at) {
#pragma unroll
      for (int d = 0; d < kDeep; ++d) {
        const int column = first + 256 * d + 8 * thread;
        if (column >= columns.end) continue;
        if (narrow) {
          *reinterpret_cast<std::uint32_t*>(at + column / 2) = values[d].x;
        } else {
          *reinterpret_cast<uint2*>(at + column) = values[d];
        }
      }
    });
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      const int column = first + 256 * d + thread / 16 * 128;
      store_scales(thread % 16 == 0 && column < columns.end, column / kMxBlock, scales[d]);
    }
  }
}

// [warp] The same for rows of type `type`.
template <int kDeep, class StoreScales>
__device__ __forceinline__ void send_mx_as(DType type, const std::byte* row, std::byte* to_row,
                                           std::uint32_t rows, ByteRange columns, Encoding encoding,
                                           StoreScales store_scales) {
  switch (type) {
    case DType::bf16:
      return send_mx<DType::bf16, kDeep>(row, to_row, rows, columns, encoding, store_scales);
    case DType::fp16:
      return send_mx<DType::fp16, kDeep>(row, to_row, rows, columns, encoding, store_scales);
    case DType::fp32:
      // See uses_stream().
      if constexpr (kDeep == 8)
        send_mx<DType::fp32, kDeep>(row, to_row, rows, columns, encoding, store_scales);
  }
}

}  // namespace ferry::cuda
