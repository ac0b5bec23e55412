// Sets the flags of rows that an engine has carried. The reducers wait for them.
#pragma once

#include "backends/cuda/device/ptx.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// [thread] Marks row `index` of staging as arrived in the call `number`.
__device__ inline void set_row_flags(const LaneView& lane, std::int64_t index, std::uint64_t number) {
  Flag* flags = memory::combine_flags(lane, lane.rank, 0, static_cast<std::int32_t>(index));
  for (int quarter = 0; quarter < kQuarters; ++quarter) store_relaxed_sys(flags + quarter, number);
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
