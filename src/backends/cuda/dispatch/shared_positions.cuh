// Positions of the rows of shared experts on this rank, in kernels.
#pragma once

#include "backends/cuda/device/row_copy.cuh"
#include "backends/cuda/dispatch/send_partition.hpp"
#include "backends/cuda/protocol/lane_view.hpp"
#include "plan/slot.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

// The shared rows of a dispatch of `tokens` tokens.
__device__ __forceinline__ SharedRows shared_rows_of(const LaneView& lane, std::int32_t tokens) {
  const auto [first, count] = SharedTokens::of(tokens, lane.rank, lane.shared_split);
  const bool padded = lane.layout == Layout::expert_padded;
  return {.first = first,
          .count = count,
          .stride = padded ? lane.capacity : lane.by_alignment.round_up(static_cast<std::int32_t>(count)),
          .capacity = padded ? lane.capacity_rows : lane.capacity};
}

// One warp's part of the rows that a call copies: slices of rows, cut finer if there are few rows.
struct RowSlices {
  std::int64_t item, stride, items;
  int log2_segments;

  // [warp] Divides `rows` rows among all warps of the launch.
  __device__ __forceinline__ static RowSlices of(std::int64_t rows) {
    const auto warps = static_cast<int>(gridDim.x * blockDim.x / 32),
               warp = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
    const int log2_segments = log2_segments_for(rows, warps);
    return {warp, warps, rows << log2_segments, log2_segments};
  }
  // [warp] Calls use(row, quarters) for each slice.
  template <class Use>
  __device__ __forceinline__ void for_each(Use use) const {
#pragma unroll 1
    for (std::int64_t at = item; at < items; at += stride)
      use(at >> log2_segments,
          Quarters::of(static_cast<int>(at & ((1 << log2_segments) - 1)), log2_segments));
  }
};

}  // namespace ferry::cuda::inline FERRY_WIDTH
