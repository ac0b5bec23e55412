// Quantises rows to NVFP4, whose blocks have 16 columns and whose scales are e4m3, while they are sent.
#pragma once

#include "backends/cuda/dispatch/destination.cuh"
#include "backends/cuda/dispatch/nvfp4_blocks.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

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
__device__ __forceinline__ bool send_nvfp4(const std::byte* row, std::byte* to_row, std::uint32_t rows,
                                           ByteRange columns, float g, StoreScales store_scales) {
  constexpr int kAccess = 32 * kNvfp4Block, kBatch = 4;  // columns; accesses whose scales are words
  static_assert(kBatch % kAtOnce == 0);
  const int thread = threadIdx.x % 32, mine = kNvfp4Block * thread;
  // Half of the threads load the last columns first, so that they read all banks of shared memory together.
  const int swapped = kType != DType::fp32 && thread / 4 % 2 != 0 ? 8 : 0;
  const Nvfp4Global global = Nvfp4Global::of(g);
  const DestinationRows to = DestinationRows::of(rows, to_row);
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
                                                   std::byte* to_row, std::uint32_t rows,
                                                   const ByteRange& columns, float g,
                                                   StoreScales store_scales) {
  if (!send_nvfp4<kType, kAtOnce>(row, to_row, rows, columns, g, store_scales))
    atomicAdd(&call.lane.state->diagnostics.bad_scales, 1ull);
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
      g = nvfp4_row_scale(largest_finite<kType, 14>(row, call.lane.hidden));
      if (quarters.last == kQuarters) store_row_scale(g);
    }
    // All loads of a batch are in flight at once.
    constexpr int kAtOnce = kType == DType::fp32 ? 1 : 4;
    send_nvfp4_columns<kType, kAtOnce>(call, row, to_row, rows, encoded_columns(call.lane, quarters), g,
                                       store_scales);
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
