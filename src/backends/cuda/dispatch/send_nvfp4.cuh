// Quantises rows to NVFP4, whose blocks have 16 columns and whose scales are e4m3, while they are sent, with
// the bytes of format/blocks.hpp.
#pragma once

#include "backends/cuda/dispatch/send_encoded.cuh"
#include "format/blocks.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

// The global scale, and 1 / g rounded to nearest.
struct Nvfp4Global {
  float g, reciprocal;

  __device__ __forceinline__ static Nvfp4Global of(float g) { return {g, __frcp_rn(g)}; }
  // Whether the scales and thresholds of all blocks stay in the range of normal numbers. False for NaN.
  __device__ __forceinline__ bool usual() const { return g >= 0x1p-60f && g <= 0x1p60f; }

  // nvfp4_scale() without divisions; for usual() g. The correction by a remainder makes amax / 6 the quotient
  // that a division gives (tried with every fraction). a / g is then off by one in the last place at most
  // (Markstein), and by nothing next to a value that lies between two codes, which is where it would matter
  // (tried with every fraction of g and every such value). Quotients above 448 become 448 all the same, so a
  // is cut at 1024 g, infinities and the NaN that they have left included. What is lost where a is so small
  // that remainders are denormal does not matter: s is 0 far above.
  __device__ __forceinline__ Nvfp4Scale scale_of(float amax) const {
    constexpr float kSixth = 1.0f / 6;
    float a = __fmul_rn(amax, kSixth);
    a = __fmaf_rn(__fmaf_rn(-a, 6.0f, amax), kSixth, a);
    a = fminf(a, 1024 * g);
    float t = __fmul_rn(a, reciprocal);
    t = __fmaf_rn(__fmaf_rn(-t, g, a), reciprocal, t);
    const auto stored = static_cast<std::uint8_t>(two_to_e4m3(t, 0));
    return {stored, __fmul_rn(value_of_e4m3(stored), g)};
  }
};

// For bf16: the magnitudes from which the code is at least 1, 2, ... 7, for a divisor d, negated, each in
// both halves of a word.
//
// The code of x rises where x / d, rounded to fp32, reaches b = 0.75, 1.75 or 3.5, or passes b = 0.25, 1.25,
// 2.5 or 5: ties go to the even code. The quotient rounds to b if it is within half of b's last place, and
// those bounds of b, times d, have 25 significant bits or more. So no value is equal to one of them, and the
// threshold is the first value of bf16 above it: above the bound rounded down, by one instruction, to fp32.
// The values of bf16 are the same in every power of two, so 2.5, 3.5 and 5 need no bounds of their own.
struct Bf16Thresholds {
  std::uint32_t negated[7];

  __device__ __forceinline__ static Bf16Thresholds of(float d) {
    // 1 in the last place of both halves, and in the last place of both exponents; the signs of both.
    constexpr std::uint32_t kOne = 0x00010001, kTwice = 0x00800080, kSigns = 0x80008000;
    const float half_place = __fmul_rn(d, 0x1p-24f);  // of the last place of numbers from d on
    const auto above = [](float bound) {
      const std::uint32_t bits = bits_of(bound);
      return __byte_perm(bits, bits, 0x3232) + (kOne + kSigns);
    };
    const std::uint32_t one = above(__fmaf_rd(d, 1.0f, half_place)),
                        one_and_quarter = above(__fmaf_rd(d, 1.25f, half_place)),
                        one_and_half = above(__fmaf_rd(d, 1.5f, -half_place)),
                        one_and_three_quarters = above(__fmaf_rd(d, 1.75f, -half_place));
    return {{one - 2 * kTwice, one_and_half - kTwice, one_and_quarter, one_and_three_quarters,
             one_and_quarter + kTwice, one_and_three_quarters + kTwice, one_and_quarter + 2 * kTwice}};
  }
};

// The bits of a code: bit 15 and bit 31 of words of two columns each.
struct CodePlanes {
  std::uint32_t sign, not_four, not_two, not_one;

  // The planes of two bf16 values. The sum of a magnitude and a negated threshold has a sign if the magnitude
  // is below; the number of thresholds that are not above it is the code, which is never below the even ones'
  // number without the odd one between. NaN is positive and above all.
  __device__ __forceinline__ static CodePlanes of(std::uint32_t two, const Bf16Thresholds& thresholds) {
    std::uint32_t below[7];
#pragma unroll
    for (int i = 0; i < 7; ++i) below[i] = add_bf16x2(two & 0x7FFF7FFF, thresholds.negated[i]);
    const std::uint32_t not_two = below[1] ^ below[3] ^ below[5];
    return {add_bf16x2(two, 0x80008000), below[3], not_two,
            not_two ^ below[0] ^ below[2] ^ below[4] ^ below[6]};
  }
};

// The codes of four columns, each in the low bits of a byte.
__device__ __forceinline__ std::uint32_t codes_of_planes(const CodePlanes& low, const CodePlanes& high) {
  constexpr std::uint32_t kSelected =
      0x7531;  // the bytes that end in bits 15 and 31 of `low`, then of `high`
  return (signs_of_bytes<kSelected>(low.sign, high.sign) & 0x08080808) |
         (~signs_of_bytes<kSelected>(low.not_four, high.not_four) & 0x04040404) |
         (~signs_of_bytes<kSelected>(low.not_two, high.not_two) & 0x02020202) |
         (~signs_of_bytes<kSelected>(low.not_one, high.not_one) & 0x01010101);
}

// Eight bf16 values by their thresholds, as e2m1, the first in the lowest four bits.
__device__ __forceinline__ std::uint32_t eight_by_thresholds(const uint4& raw,
                                                             const Bf16Thresholds& thresholds) {
  const std::uint32_t first = codes_of_planes(CodePlanes::of(raw.x, thresholds),
                                              CodePlanes::of(raw.y, thresholds)),
                      last = codes_of_planes(CodePlanes::of(raw.z, thresholds),
                                             CodePlanes::of(raw.w, thresholds));
  return __byte_perm(first | first >> 4, last | last >> 4, 0x6420);
}

// Keeps the bits of a number that fp16 has, and sets the last of them if any lower bit was set. Rounding the
// result to fewer bits then rounds as the number itself would.
__device__ __forceinline__ float round_to_odd_fp16(float x) {
  constexpr std::uint32_t kDropped = 0x1FFF;
  const std::uint32_t bits = bits_of(x);
  return float_of((bits | ((bits & kDropped) + kDropped)) & ~kDropped);
}

// Eight columns divided by the divisor d, as e2m1, the first in the lowest four bits. `y`: 1 / d rounded to
// nearest. For d of usual() scales.
//
// Two corrections of x * y by its remainder make the quotient that a division gives (Markstein). Quotients
// above 6 become 6 all the same, so x is cut at 8 d; nothing of a quotient that does not round to 0 is lost
// to underflow.
__device__ __forceinline__ std::uint32_t eight_quotients(const float (&x)[8], float d, float y) {
  const auto quotient = [&](float of) {
    const float cut = fmaxf(fminf(of, 8 * d), -8 * d);  // NaN is positive
    float q = __fmul_rn(cut, y);
    q = __fmaf_rn(__fmaf_rn(-q, d, cut), y, q);
    q = __fmaf_rn(__fmaf_rn(-q, d, cut), y, q);
    return round_to_odd_fp16(copysignf(q, cut));  // the corrections lose the sign of -0
  };
  std::uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const std::uint32_t two = two_to_e2m1(quotient(x[i]), quotient(x[i + 1]));
    codes |= ((two | two >> 12) & 0xFF) << (4 * i);
  }
  return codes;
}

// The largest magnitude of a block, NaN ignored.
template <DType kType>
__device__ __forceinline__ float block_maximum(const RawEight& first, const RawEight& last) {
  if constexpr (kType == DType::fp32) {
    float x[8], y[8], most = 0;
    unpack(kType, first, x);
    unpack(kType, last, y);
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, fmaxf(fabsf(x[i]), fabsf(y[i])));
    return most;
  } else {
    const std::uint32_t both = max_of_two_accesses<kType>(first.low, last.low);
    return fmaxf(fmaxf(magnitude_in<kType>(both, 0), magnitude_in<kType>(both, 1)), 0.0f);
  }
}

struct Nvfp4Block {
  uint2 codes;  // of 16 columns, the first in the lowest four bits of x
  Nvfp4Scale scale;
};

static __device__ __noinline__ std::uint32_t nvfp4_code(Nvfp4Scale scale, float x) {
  return scale.code(x);
}

// The block as format/blocks.hpp defines it, for any global scale.
template <DType kType>
static __device__ __noinline__ Nvfp4Block nvfp4_block_by_division(RawEight first, RawEight last, float amax,
                                                                  float g) {
  Nvfp4Block block{{0, 0}, nvfp4_scale(amax, g)};
  float x[8], y[8];
  unpack(kType, first, x);
  unpack(kType, last, y);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    block.codes.x |= nvfp4_code(block.scale, x[i]) << (4 * i);
    block.codes.y |= nvfp4_code(block.scale, y[i]) << (4 * i);
  }
  return block;
}

// A faster nvfp4_block() for raw values.
template <DType kType>
__device__ __forceinline__ Nvfp4Block nvfp4_block(const RawEight& first, const RawEight& last,
                                                  const Nvfp4Global& global) {
  const float amax = block_maximum<kType>(first, last);
  if (!global.usual()) return nvfp4_block_by_division<kType>(first, last, amax, global.g);
  const Nvfp4Scale scale = global.scale_of(amax);
  const float d = scale.divisor;
  uint2 codes;
  if constexpr (kType == DType::bf16) {
    const Bf16Thresholds thresholds = Bf16Thresholds::of(d);
    codes = {eight_by_thresholds(first.low, thresholds), eight_by_thresholds(last.low, thresholds)};
  } else {
    float x[8];
    const float y = __frcp_rn(d);
    unpack(kType, first, x);
    codes.x = eight_quotients(x, d, y);
    unpack(kType, last, x);
    codes.y = eight_quotients(x, d, y);
  }
  return {{d == 0 ? 0 : codes.x, d == 0 ? 0 : codes.y}, scale};
}

// [warp] Calls use(raw) with the eight values of each access that this thread has of a row of `columns`,
// which are a multiple of 8, kDeep accesses in flight at once; with zeros past the end.
template <DType kType, int kDeep, class Use>
__device__ __forceinline__ void for_each_eight(const std::byte* row, int columns, Use use) {
  constexpr int kBatch = kDeep * 256;
  const int mine = 8 * static_cast<int>(threadIdx.x % 32);
  int first = 0;
  // Whole batches, without a look at the end for each access.
#pragma unroll 1
  for (; first + kBatch <= columns; first += kBatch) {
    RawEight raw[kDeep];
#pragma unroll
    for (int d = 0; d < kDeep; ++d) raw[d] = load_eight(kType, row, first + 256 * d + mine);
#pragma unroll
    for (int d = 0; d < kDeep; ++d) use(raw[d]);
  }
  if (first == columns) return;
  RawEight raw[kDeep] = {};
#pragma unroll
  for (int d = 0; d < kDeep; ++d) {
    const int column = first + 256 * d + mine;
    if (column < columns) raw[d] = load_eight(kType, row, column);
  }
#pragma unroll
  for (int d = 0; d < kDeep; ++d) use(raw[d]);
}

// [warp] The largest finite magnitude of a row, value by value.
template <DType kType>
static __device__ __noinline__ std::int32_t largest_finite_by_value(const std::byte* row, int columns) {
  std::int32_t largest = 0;  // magnitudes are ordered as their bits
  for_each_eight<kType, 1>(row, columns, [&](const RawEight& raw) {
    float x[8];
    unpack(kType, raw, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const std::int32_t magnitude = magnitude_of(x[i]);
      if (magnitude < kFp32Infinity) largest = max(largest, magnitude);
    }
  });
  return __reduce_max_sync(~0u, largest);
}

// The largest of `most` and of this thread's values of a row, two 16-bit values at once, NaN ignored.
template <DType kType, int kDeep>
__device__ __forceinline__ std::uint32_t largest_of_thread(const std::byte* row, int columns,
                                                           std::uint32_t most) {
  for_each_eight<kType, kDeep>(row, columns, [&](const RawEight& raw) {
    const std::uint32_t first = max_magnitude_x2<kType>(raw.low.x, raw.low.y),
                        last = max_magnitude_x2<kType>(raw.low.z, raw.low.w);
    most = max_magnitude_x2<kType>(most, max_magnitude_x2<kType>(first, last));
  });
  return most;
}

// [warp] The largest magnitude of every thread's `most`, which is no NaN.
template <DType kType>
__device__ __forceinline__ std::int32_t largest_of_warp(std::uint32_t most) {
  return __reduce_max_sync(~0u,
                           magnitude_of(fmaxf(magnitude_in<kType>(most, 0), magnitude_in<kType>(most, 1))));
}

// [warp] The largest finite magnitude of a row. Only a row with an infinity is read again.
template <DType kType, int kDeep>
__device__ __forceinline__ float largest_finite(const std::byte* row, int columns) {
  std::int32_t largest = kFp32Infinity;
  if constexpr (kType != DType::fp32)
    largest = largest_of_warp<kType>(largest_of_thread<kType, kDeep>(row, columns, 0));
  if (largest == kFp32Infinity) largest = largest_finite_by_value<kType>(row, columns);
  return float_of(static_cast<std::uint32_t>(largest));
}

// [warp] largest_finite() for a row of 16-bit values in two pieces of a stream: `second` returns the address
// of the second, of `columns_of_second`, which may be 0.
template <DType kType, class Second>
__device__ __forceinline__ float largest_finite_of_pieces(const std::byte* first, int columns_of_first,
                                                          int columns_of_second, Second second) {
  std::uint32_t most = largest_of_thread<kType, 7>(first, columns_of_first, 0);
  const std::byte* other = nullptr;
  if (columns_of_second > 0) {
    other = second();
    most = largest_of_thread<kType, 7>(other, columns_of_second, most);
  }
  std::int32_t largest = largest_of_warp<kType>(most);
  if (largest == kFp32Infinity) {
    largest = largest_finite_by_value<kType>(first, columns_of_first);
    if (other != nullptr) largest = max(largest, largest_finite_by_value<kType>(other, columns_of_second));
  }
  return float_of(static_cast<std::uint32_t>(largest));
}

// [warp] Of every four threads, thread i gets the words of byte i of their words, the first thread's lowest.
__device__ __forceinline__ std::uint32_t transposed_bytes(std::uint32_t mine) {
  const bool odd = threadIdx.x % 2 != 0, upper = threadIdx.x % 4 >= 2;
  const std::uint32_t neighbour = __shfl_xor_sync(~0u, mine, 1);
  const std::uint32_t two = __byte_perm(mine, neighbour, odd ? 0x3715 : 0x6240);
  const std::uint32_t other = __shfl_xor_sync(~0u, two, 2);
  return __byte_perm(two, other, upper ? 0x3276 : 0x5410);
}

// The rows to which a warp stores the same bytes, two of them known: most tokens go to no more ranks.
struct DestinationRows {
  std::byte *first, *second;  // null: none
  std::uint32_t others;
  std::byte* mine;

  __device__ __forceinline__ static DestinationRows of(std::uint32_t rows, std::byte* mine) {
    DestinationRows to{nullptr, nullptr, rows, mine};
    to.first = to.next();
    to.second = to.next();
    return to;
  }
  template <class Store>
  __device__ __forceinline__ void for_each(Store store) const {
    if (first != nullptr) store(first);
    if (second != nullptr) store(second);
    Destination::for_each(others, mine, store);
  }

 private:
  __device__ __forceinline__ std::byte* next() {
    if (others == 0) return nullptr;
    std::byte* const row = pointer_of(mine, __ffs(static_cast<int>(others)) - 1);
    others &= others - 1;
    return row;
  }
};

// [warp] As send_encoded(), with `g` as the scale of the call or the row, kAtOnce accesses of 512 columns at
// a time; a thread has the 16 columns of a block in each. Returns whether this thread could form the scales
// of its blocks.
template <DType kType, int kAtOnce, class StoreScales>
__device__ __forceinline__ bool send_nvfp4(const std::byte* row, const EncodedRows& to_rows,
                                           ByteRange columns, float g, StoreScales store_scales) {
  constexpr int kAccess = 32 * kNvfp4Block, kBatch = 4;  // columns; accesses whose scales are words
  static_assert(kBatch % kAtOnce == 0);
  const int thread = threadIdx.x % 32, mine = kNvfp4Block * thread;
  // Half of the threads load the last columns first, so that they read all banks of shared memory together.
  const int swapped = kType != DType::fp32 && thread / 4 % 2 != 0 ? 8 : 0;
  const Nvfp4Global global = Nvfp4Global::of(g);
  const DestinationRows to = DestinationRows::of(to_rows.threads, to_rows.row);
  bool valid = true;
#pragma unroll 1
  for (int batch = columns.begin; batch < columns.end; batch += kBatch * kAccess) {
    std::uint32_t bytes = 0;  // the scales of this thread's blocks
#pragma unroll 1
    for (int at = 0; at < kBatch && batch + at * kAccess < columns.end; at += kAtOnce) {
      const int first = batch + at * kAccess + mine;
      RawEight raw[kAtOnce][2] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i * kAccess >= columns.end) continue;
        raw[i][0] = load_eight(kType, row, first + i * kAccess + swapped);
        raw[i][1] = load_eight(kType, row, first + i * kAccess + (swapped ^ 8));
      }
      Nvfp4Block block[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) block[i] = nvfp4_block<kType>(raw[i][0], raw[i][1], global);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i * kAccess >= columns.end) continue;
        bytes |= std::uint32_t{block[i].scale.stored} << (8 * (at + i));
        valid = valid && block[i].scale.valid();
      }
      to.for_each([&](std::byte* row_there) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int column = first + i * kAccess;
          const uint2 codes = block[i].codes;
          if (column < columns.end)
            *reinterpret_cast<uint2*>(row_there + column / 2) =
                swapped != 0 ? make_uint2(codes.y, codes.x) : codes;
        }
      });
    }
    const int column = batch + thread % kBatch * kAccess + thread / kBatch * (kBatch * kNvfp4Block);
    store_scales(column < columns.end, column / kNvfp4Block, transposed_bytes(bytes));
  }
  return valid;
}

// [warp] Sends `columns` of a row with `g` as the scale of the call or the row.
template <DType kType, int kAtOnce, class StoreScales>
__device__ __forceinline__ void send_nvfp4_columns(const DispatchArguments& call, const std::byte* row,
                                                   const EncodedRows& to, const ByteRange& columns, float g,
                                                   StoreScales store_scales) {
  if (!send_nvfp4<kType, kAtOnce>(row, to, columns, g, store_scales))
    atomicAdd(&call.lane.state->diagnostics.bad_scales, 1ull);
}

// [warp] Some quarters of a token's row. store_row_scale(g) stores the scale of the whole row, in a format
// that has one. Rows without a destination are not looked at.
template <class StoreScales, class StoreRowScale>
__device__ __forceinline__ void send_nvfp4_quarters(const DispatchArguments& call, const std::byte* row,
                                                    const EncodedRows& to, const Quarters& quarters,
                                                    StoreScales store_scales, StoreRowScale store_row_scale) {
  if (to.threads == 0) return;
  const auto send = [&]<DType kType>() {
    float g = call.global_scale != nullptr ? *call.global_scale : 1.0f;
    if (call.encoding.row_scale) {
      g = nvfp4_row_scale(largest_finite<kType, 14>(row, call.lane.hidden));
      if (quarters.last == kQuarters) store_row_scale(g);
    }
    // All loads of a batch are in flight at once.
    constexpr int kAtOnce = kType == DType::fp32 ? 1 : 4;
    send_nvfp4_columns<kType, kAtOnce>(call, row, to, encoded_columns(call.lane, quarters), g, store_scales);
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

}  // namespace ferry::cuda::inline FERRY_WIDTH
