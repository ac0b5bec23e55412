// Quantises rows to fp8 or to an MX format, whose blocks are shorter and whose scales are bytes, while they
// are sent.
#pragma once

#include <type_traits>

#include "backends/cuda/device/row_copy.cuh"
#include "backends/cuda/device/values.cuh"
#include "backends/cuda/dispatch/dispatch.hpp"
#include "backends/cuda/protocol/lane_memory.cuh"
#include "format/blocks.hpp"
#include "format/numbers.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

// The addresses of a message at its destination rank, in the thread that leads it; null in other threads.
struct Destination {
  std::byte* message = nullptr;  // in the rank's staging
  LLPacket* metadata = nullptr;  // of the message's slots
  std::byte* row = nullptr;  // part 0: in the message, or the final position (direct write); null: not sent
  Flag* flags = nullptr;     // of the message's segments

  __device__ __forceinline__ static Destination of(const LaneView& lane, int rank, int parity,
                                                   std::int32_t message, std::int32_t bytes) {
    Destination to;
    to.metadata = memory::slot_metadata(lane, rank, parity, lane.rank, message);
    to.message = memory::message(lane, rank, parity, lane.rank, message, bytes);
    to.flags = memory::dispatch_flags(lane, rank, parity, lane.rank, message);
    return to;
  }

  // [warp] Calls store(address) with the `mine` of each thread in `threads` (one bit each).
  template <class Store>
  __device__ __forceinline__ static void for_each(std::uint32_t threads, std::byte* mine, Store store) {
#pragma unroll 1
    for (; threads != 0; threads &= threads - 1) {
      const int thread = __ffs(static_cast<int>(threads)) - 1;
      store(pointer_of(mine, thread));
    }
  }
};

// The rows that a warp encodes to: the `row` of each thread in `threads` (one bit each).
struct EncodedRows {
  std::byte* row;
  std::uint32_t threads;
};

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

// [warp] Quantises some columns of a row, which may be in global or in shared memory.
// store_scales(stores, offset, word) stores scales for the rows of `to`: threads that `store` have the `word`
// at byte `offset` of the row of scales.
template <DType kType, int kDeep, class StoreScales>
__device__ __forceinline__ void send_encoded(const std::byte* row, const EncodedRows& to, ByteRange columns,
                                             Encoding encoding, StoreScales store_scales) {
  const int thread = threadIdx.x % 32;
#pragma unroll 1
  for (int first = columns.begin; first < columns.end; first += kDeep * 256) {
    RawEight raw[kDeep] = {};
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      const int column = first + 256 * d + 8 * thread;
      if (column < columns.end) raw[d] = load_eight(kType, row, column);
    }
    // Each thread divides for one block; the factor is then shuffled.
    const float largest = block_max_magnitude<kType, kDeep>(raw);
    const BlockScale mine = fp8_scale(largest, encoding.rule);
    uint2 values[kDeep];
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      float x[8];
      unpack(kType, raw[d], x);
      values[d] = encode_eight(x, __shfl_sync(~0u, mine.factor, 2 * d + thread / 16));
    }
    Destination::for_each(to.threads, to.row, [&](std::byte* at) {
#pragma unroll
      for (int d = 0; d < kDeep; ++d) {
        const int column = first + 256 * d + 8 * thread;
        if (column < columns.end) *reinterpret_cast<uint2*>(at + column) = values[d];
      }
    });
    const int block = first / kFp8Block + thread;
    const bool has = thread < 2 * kDeep && block * kFp8Block < columns.end;
    const std::uint32_t word = scale_word(encoding, has, mine.scale);
    const bool stores = encoding.packs_scales() ? has && thread % 4 == 0 : has;
    const std::int64_t offset = encoding.packs_scales() ? block : 4 * block;
    store_scales(stores, offset, word);
  }
}

// [warp] send_encoded() for rows of type `type`.
template <int kDeep, class StoreScales>
__device__ __forceinline__ void send_encoded_as(DType type, const std::byte* row, const EncodedRows& to,
                                                ByteRange columns, Encoding encoding,
                                                StoreScales store_scales) {
  switch (type) {
    case DType::bf16:
      return send_encoded<DType::bf16, kDeep>(row, to, columns, encoding, store_scales);
    case DType::fp16:
      return send_encoded<DType::fp16, kDeep>(row, to, columns, encoding, store_scales);
    case DType::fp32:
      // See uses_stream().
      if constexpr (kDeep == 8) send_encoded<DType::fp32, kDeep>(row, to, columns, encoding, store_scales);
  }
}

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
__device__ __forceinline__ void send_mx(const std::byte* row, const EncodedRows& to, ByteRange columns,
                                        Encoding encoding, StoreScales store_scales) {
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
    Destination::for_each(to.threads, to.row, [&](std::byte* at) {
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
__device__ __forceinline__ void send_mx_as(DType type, const std::byte* row, const EncodedRows& to,
                                           ByteRange columns, Encoding encoding, StoreScales store_scales) {
  const auto send = [&]<DType kType>() {
    if (encoding.element == ElementType::e4m3) {
      send_mx<kType, kDeep, ElementType::e4m3>(row, to, columns, encoding, store_scales);
    } else {
      send_mx<kType, kDeep, ElementType::e2m1>(row, to, columns, encoding, store_scales);
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
