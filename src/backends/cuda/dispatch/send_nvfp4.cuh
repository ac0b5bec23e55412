// Quantises rows to NVFP4, whose blocks have 16 columns and whose scales are e4m3, while they are sent.
#pragma once

#include "backends/cuda/dispatch/destination.cuh"
#include "backends/cuda/dispatch/send_microscaled.cuh"
#include "format/nvfp4_block.hpp"

namespace ferry::cuda {

// [warp] The largest finite magnitude of a row of `columns`, which are a multiple of 8.
template <DType kType>
__device__ __forceinline__ float largest_finite(const std::byte* row, int columns) {
  std::int32_t largest = 0;  // magnitudes are ordered as their bits
  for (int column = 8 * static_cast<int>(threadIdx.x % 32); column < columns; column += 256) {
    float x[8];
    unpack(kType, load_eight(kType, row, column), x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const std::int32_t magnitude = magnitude_of(x[i]);
      if (magnitude < kFp32Infinity) largest = max(largest, magnitude);
    }
  }
  return float_of(static_cast<std::uint32_t>(__reduce_max_sync(~0u, largest)));
}

// [warp] Every two threads have the scale bytes of a block in each of four accesses, one access to a byte of
// `bytes`. Threads 0 to 15 get words of scales: thread t that of the columns from 64 * t on.
__device__ __forceinline__ std::uint32_t nvfp4_scale_word(std::uint32_t bytes) {
  const int thread = threadIdx.x % 32, access = thread / 4 % 4, quarter = thread % 4;
  std::uint32_t word = 0;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    const std::uint32_t of_block = __shfl_sync(~0u, bytes, 8 * quarter + 2 * block);
    word |= (of_block >> (8 * access) & 0xFFu) << (8 * block);
  }
  return word;
}

static __device__ __noinline__ std::uint32_t code_of_quotient(float x, float divisor) {
  return fp32_to_e2m1(x / divisor);
}

// The scale of a block, and 1 / divisor rounded to nearest.
struct Nvfp4Factor {
  Nvfp4Scale scale;
  float reciprocal;

  __device__ __forceinline__ static Nvfp4Factor of(float largest, float g) {
    const Nvfp4Scale scale = nvfp4_scale(largest, g);
    return {scale, __frcp_rn(scale.divisor)};
  }
  // The factor of the other thread of a pair.
  __device__ __forceinline__ Nvfp4Factor of_other() const {
    const std::uint32_t stored = __shfl_xor_sync(~0u, std::uint32_t{scale.stored}, 1);
    return {{static_cast<std::uint8_t>(stored), __shfl_xor_sync(~0u, scale.divisor, 1)},
            __shfl_xor_sync(~0u, reciprocal, 1)};
  }
};

// [warp] The factors of four blocks that are the same for two threads: each thread makes those of two.
__device__ __forceinline__ void nvfp4_factors(const float (&largest)[4], float g, Nvfp4Factor (&factor)[4]) {
  const bool odd = threadIdx.x % 2 != 0;
  const Nvfp4Factor first = Nvfp4Factor::of(odd ? largest[2] : largest[0], g);
  const Nvfp4Factor second = Nvfp4Factor::of(odd ? largest[3] : largest[1], g);
  const Nvfp4Factor other_first = first.of_other(), other_second = second.of_other();
  factor[0] = odd ? other_first : first;
  factor[1] = odd ? other_second : second;
  factor[2] = odd ? first : other_first;
  factor[3] = odd ? second : other_second;
}

// Keeps the bits of a number that fp16 has, the last of them 1 if any other bit was. Rounding the result to
// fewer bits rounds as the number itself would.
__device__ __forceinline__ float round_to_odd_fp16(float x) {
  constexpr std::uint32_t kDropped = 0x1FFF;
  const std::uint32_t bits = bits_of(x);
  return float_of((bits | ((bits & kDropped) + kDropped)) & ~kDropped);
}

// Eight columns divided by the scale's divisor, as e2m1, the first in the lowest four bits.
//
// The usual divisors are divided by without a division for each value: two corrections of x * y by its
// remainder, where y is 1 / d rounded to nearest, make the quotient that a division gives (Markstein).
// Quotients above 6 become 6 all the same, so x is cut at 8 d; within the bounds for d nothing of a quotient
// that does not round to 0 is lost to underflow.
__device__ __forceinline__ std::uint32_t eight_quotients(const float (&x)[8], const Nvfp4Factor& factor) {
  const float d = factor.scale.divisor, y = factor.reciprocal;
  std::uint32_t codes = 0;
  if (d == 0) return codes;
  if (d < 0x1p-90f || d > 0x1p90f) {
#pragma unroll
    for (int i = 0; i < 8; ++i) codes |= code_of_quotient(x[i], d) << (4 * i);
    return codes;
  }
  const auto quotient = [&](float of) {
    const float cut = fmaxf(fminf(of, 8 * d), -8 * d);  // NaN is positive
    float q = __fmul_rn(cut, y);
    q = __fmaf_rn(__fmaf_rn(-q, d, cut), y, q);
    q = __fmaf_rn(__fmaf_rn(-q, d, cut), y, q);
    return round_to_odd_fp16(copysignf(q, cut));  // the corrections lose the sign of -0
  };
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const std::uint32_t two = two_to_e2m1(quotient(x[i]), quotient(x[i + 1]));
    codes |= ((two | two >> 12) & 0xFF) << (4 * i);
  }
  return codes;
}

// [warp] As send_encoded(), with `g` as the scale of the call or the row. Returns whether this thread could
// form the scales of its blocks.
template <DType kType, class StoreScales>
__device__ __forceinline__ bool send_nvfp4(const std::byte* row, std::byte* to_row, std::uint32_t rows,
                                           ByteRange columns, float g, StoreScales store_scales) {
  constexpr int kDeep = 4;
  const int thread = threadIdx.x % 32;
  bool valid = true;
#pragma unroll 1
  for (int first = columns.begin; first < columns.end; first += kDeep * 256) {
    RawEight raw[kDeep] = {};
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      const int column = first + 256 * d + 8 * thread;
      if (column < columns.end) raw[d] = load_eight(kType, row, column);
    }
    float largest[kDeep];
    block_maxima<kType, kDeep, kNvfp4Block>(raw, largest);
    Nvfp4Factor factor[kDeep];
    nvfp4_factors(largest, g, factor);
    std::uint32_t values[kDeep], bytes = 0;
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      float x[8];
      unpack(kType, raw[d], x);
      values[d] = eight_quotients(x, factor[d]);
      if (first + 256 * d + 8 * thread >= columns.end) continue;
      bytes |= std::uint32_t{factor[d].scale.stored} << (8 * d);
      valid = valid && factor[d].scale.valid();
    }
    const std::uint32_t word = nvfp4_scale_word(bytes);
    Destination::for_each(rows, to_row, [&](std::byte* at) {
#pragma unroll
      for (int d = 0; d < kDeep; ++d) {
        const int column = first + 256 * d + 8 * thread;
        if (column < columns.end) *reinterpret_cast<std::uint32_t*>(at + column / 2) = values[d];
      }
    });
    const int column = first + 64 * thread;
    store_scales(thread < 4 * kDeep && column < columns.end, column / kNvfp4Block, word);
  }
  return valid;
}

// [warp] Some quarters of a token's row. store_row_scale(g) stores the scale of the whole row, in a format
// that has one. Rows without a destination are not looked at.
template <class StoreScales, class StoreRowScale>
__device__ __forceinline__ void send_nvfp4_quarters(const DispatchArguments& call, const std::byte* row,
                                                    std::byte* to_row, std::uint32_t rows,
                                                    const Quarters& quarters, StoreScales store_scales,
                                                    StoreRowScale store_row_scale) {
  if (rows == 0) return;
  const auto send = [&]<DType kType>() {
    float g = call.global_scale != nullptr ? *call.global_scale : 1.0f;
    if (call.encoding.row_scale) {
      g = nvfp4_row_scale(largest_finite<kType>(row, call.lane.hidden));
      if (quarters.last == kQuarters) store_row_scale(g);
    }
    const bool valid =
        send_nvfp4<kType>(row, to_row, rows, encoded_columns(call.lane, quarters), g, store_scales);
    if (!valid) atomicAdd(&call.lane.state->diagnostics.bad_scales, 1ull);
  };
  switch (call.type) {
    case DType::bf16:
      return send.template operator()<DType::bf16>();
    case DType::fp16:
      return send.template operator()<DType::fp16>();
    case DType::fp32:
      return send.template operator()<DType::fp32>();
  }
}

}  // namespace ferry::cuda
