// Rows that an engine has carried: their flags, which the reducers await, and sums of the rows of one token.
#pragma once

#include "backends/cuda/device/values.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"
#include "layout/exchange_layout.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

// [thread] Marks row `index` of staging as arrived in the call `number`.
__device__ inline void set_row_flags(const LaneView& lane, std::int64_t index, std::uint64_t number) {
  Flag* flags = memory::combine_flags(lane, lane.rank, 0, static_cast<std::int32_t>(index));
  for (int quarter = 0; quarter < kQuarters; ++quarter) store_relaxed_sys(flags + quarter, number);
}

inline constexpr int kMergeThreads = 256;

// [block] to = the sum of the rows' values, in their order from +0, rounded to kType. `to` may be a row.
template <DType kType>
__device__ void add_values(std::int32_t hidden, std::byte* const* row, int count, std::byte* to) {
  constexpr int kEach = kPerAccess<kType>;
  for (int column = static_cast<int>(threadIdx.x) * kEach; column < hidden; column += kMergeThreads * kEach) {
    float sum[kEach] = {};
    const std::int64_t at = column * value_bytes(kType);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      float value[kEach];
      unpack<kType>(*reinterpret_cast<const uint4*>(row[i] + at), value);
#pragma unroll
      for (int v = 0; v < kEach; ++v) sum[v] = __fadd_rn(sum[v], value[v]);
    }
    *reinterpret_cast<uint4*>(to + at) = packed<kType>(sum);
  }
}

// [block] Adds rows of a type known at run time. A single row is copied: adding it to +0 would change only a
// -0 or the bits of a NaN, which the source rank's addition changes in the same way.
__device__ inline void add_values(DType type, std::int32_t hidden, std::byte* const* row, int count,
                                  std::byte* to) {
  if (count == 1) {
    const std::int64_t bytes = hidden * value_bytes(type);
    for (std::int64_t at = 16 * threadIdx.x; row[0] != to && at < bytes; at += 16 * kMergeThreads)
      *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(row[0] + at);
    return;
  }
  switch (type) {
    case DType::bf16:
      return add_values<DType::bf16>(hidden, row, count, to);
    case DType::fp16:
      return add_values<DType::fp16>(hidden, row, count, to);
    case DType::fp32:
      return add_values<DType::fp32>(hidden, row, count, to);
  }
}

// [block] Values of routes: each rank's row has those of its own slots, and zero bits for the others.
__device__ inline void join_tails(std::int64_t tail_offset, std::int32_t top_k, std::byte* const* row,
                                  int count, std::byte* to) {
  const int slot = static_cast<int>(threadIdx.x);
  if (slot >= top_k) return;
  const auto word = [&](std::byte* of) { return reinterpret_cast<std::uint32_t*>(of + tail_offset) + slot; };
  std::uint32_t joined = 0;
  for (int i = 0; i < count; ++i) joined |= *word(row[i]);
  *word(to) = joined;
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
