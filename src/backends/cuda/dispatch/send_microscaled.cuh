// Quantises rows to the microscaled formats, whose blocks are shorter than 128 columns and whose scales are
// bytes, while they are sent.
#pragma once

#include <type_traits>

#include "backends/cuda/dispatch/destination.cuh"
#include "backends/cuda/dispatch/encode.cuh"
#include "format/blocks.hpp"
#include "format/numbers.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

// [warp] The largest magnitudes of the blocks of kBlock columns, NaN ignored, of accesses of 256 columns: two
// or four threads have 8 columns each of a block, and all of them get its result.
template <DType kType, int kDeep, int kBlock>
__device__ __forceinline__ void block_maxima(const RawEight (&raw)[kDeep], float (&largest)[kDeep]) {
  static_assert(kBlock == 16 || kBlock == 32);
  if constexpr (kType == DType::fp32) {
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      float x[8], most = 0;
      unpack(kType, raw[d], x);
#pragma unroll
      for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(x[i]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      if constexpr (kBlock == 32) most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      largest[d] = most;
    }
  } else {
    static_assert(kDeep % 2 == 0);
    // Values of two accesses are compared in one word, without unpacking them.
#pragma unroll
    for (int d = 0; d < kDeep; d += 2) {
      std::uint32_t most = max_of_two_accesses<kType>(raw[d].low, raw[d + 1].low);
      most = max_magnitude_x2<kType>(most, __shfl_xor_sync(~0u, most, 1));
      if constexpr (kBlock == 32) most = max_magnitude_x2<kType>(most, __shfl_xor_sync(~0u, most, 2));
      largest[d] = fmaxf(magnitude_in<kType>(most, 0), 0.0f);  // 0 for NaN: every value of the block is one
      largest[d + 1] = fmaxf(magnitude_in<kType>(most, 1), 0.0f);
    }
  }
}

// Two values as e2m1, in the low four bits of the halves of a word. Exact for scaled 16-bit values: those
// that fp16 does not represent are below 2^-14 and become 0 all the same. How: as narrow_magnitude(), in
// fp16.
__device__ __forceinline__ std::uint32_t two_to_e2m1(float low, float high) {
  constexpr std::uint32_t kMax = 0x46004600, kLowest = 0x3C003C00;  // 6 and 1
  constexpr int kDropped = 9;                                       // bits of fraction
  const std::uint32_t both = two_to_fp16(low, high);                // NaN is positive
  const std::uint32_t magnitude = min_fp16x2(both & 0x7FFF7FFF, kMax);
  const std::uint32_t exponent = __vmaxu2(magnitude & 0x7C007C00, kLowest);
  const std::uint32_t c = exponent + (kDropped << 10 | kDropped << 26);
  const std::uint32_t last_places = add_fp16x2(magnitude, c) - c;
  return (last_places + ((exponent - kLowest) >> kDropped)) | (both & 0x80008000) >> 12;
}

// Eight columns as e2m1, the first in the lowest four bits.
template <DType kType>
__device__ __forceinline__ std::uint32_t eight_to_e2m1(const float (&x)[8], float factor) {
  std::uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const float low = __fmul_rn(x[i], factor), high = __fmul_rn(x[i + 1], factor);
    std::uint32_t byte;
    if constexpr (kType == DType::fp32) {
      byte = fp32_to_e2m1(low) | fp32_to_e2m1(high) << 4;
    } else {
      const std::uint32_t two = two_to_e2m1(low, high);
      byte = (two | two >> 12) & 0xFF;
    }
    codes |= byte << (4 * i);
  }
  return codes;
}

// [warp] Every four threads have the scale bytes of a block in each of four accesses, one access to a byte of
// `bytes`. Thread t gets the word of blocks 4h to 4h + 3 of access a, with a = t / 2 % 4 and h = t % 2.
__device__ __forceinline__ std::uint32_t mx_scale_word(std::uint32_t bytes) {
  const int thread = threadIdx.x % 32, access = thread / 2 % 4, half = thread % 2;
  std::uint32_t word = 0;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    const std::uint32_t of_block = __shfl_sync(~0u, bytes, 16 * half + 4 * block);
    word |= (of_block >> (8 * access) & 0xFFu) << (8 * block);
  }
  return word;
}

// [warp] As send_encoded(), for an MX format with elements of kElement.
template <DType kType, int kDeep, ElementType kElement, class StoreScales>
__device__ __forceinline__ void send_mx(const std::byte* row, std::byte* to_row, std::uint32_t rows,
                                        ByteRange columns, Encoding encoding, StoreScales store_scales) {
  static_assert(2 * kDeep <= 32);
  const int thread = threadIdx.x % 32;
  constexpr bool kNarrow = kElement == ElementType::e2m1;
#pragma unroll 1
  for (int first = columns.begin; first < columns.end; first += kDeep * 256) {
    RawEight raw[kDeep] = {};
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      const int column = first + 256 * d + 8 * thread;
      if (column < columns.end) raw[d] = load_eight(kType, row, column);
    }
    float largest[kDeep];
    block_maxima<kType, kDeep, kMxBlock>(raw, largest);
    std::conditional_t<kNarrow, std::uint32_t, uint2> values[kDeep];  // eight columns
    std::uint32_t word = 0;  // four scales: of the columns from first + 128 * thread
#pragma unroll
    for (int group = 0; group < kDeep; group += 4) {
      std::uint32_t bytes = 0;
#pragma unroll
      for (int d = group; d < group + 4 && d < kDeep; ++d) {
        const BlockScale scale = mx_scale(largest[d], encoding.rule, kElement);
        float x[8];
        unpack(kType, raw[d], x);
        if constexpr (kNarrow) {
          values[d] = eight_to_e2m1<kType>(x, scale.factor);
        } else {
          values[d] = encode_eight(x, scale.factor);
        }
        const bool has = first + 256 * d + thread / 4 * kMxBlock < columns.end;
        if (has) bytes |= std::uint32_t{biased_exponent(scale.scale)} << (8 * (d - group));
      }
      const std::uint32_t of_group = mx_scale_word(bytes);
      if (thread / 8 == group / 4) word = of_group;
    }
    Destination::for_each(rows, to_row, [&](std::byte* at) {
#pragma unroll
      for (int d = 0; d < kDeep; ++d) {
        const int column = first + 256 * d + 8 * thread;
        if (column < columns.end)
          *reinterpret_cast<decltype(&values[0])>(at + (kNarrow ? column / 2 : column)) = values[d];
      }
    });
    const int column = first + 128 * thread;
    store_scales(thread < 2 * kDeep && column < columns.end, column / kMxBlock, word);
  }
}

// [warp] send_mx() for the element of `encoding` and rows of type `type`.
template <int kDeep, class StoreScales>
__device__ __forceinline__ void send_mx_as(DType type, const std::byte* row, std::byte* to_row,
                                           std::uint32_t rows, ByteRange columns, Encoding encoding,
                                           StoreScales store_scales) {
  const auto send = [&]<DType kType>() {
    if (encoding.element == ElementType::e4m3) {
      send_mx<kType, kDeep, ElementType::e4m3>(row, to_row, rows, columns, encoding, store_scales);
    } else {
      send_mx<kType, kDeep, ElementType::e2m1>(row, to_row, rows, columns, encoding, store_scales);
    }
  };
  switch (type) {
    case DType::bf16:
      return send.template operator()<DType::bf16>();
    case DType::fp16:
      return send.template operator()<DType::fp16>();
    case DType::fp32:
      // See uses_stream().
      if constexpr (kDeep == 8) send.template operator()<DType::fp32>();
  }
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
