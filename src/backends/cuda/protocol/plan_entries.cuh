// Checked reads of a plan's message counts: a damaged plan must not make a kernel read or write outside its
// arrays.
#pragma once

#include "backends/cuda/protocol/diagnostics.cuh"
#include "backends/cuda/protocol/lane_view.hpp"
#include "layout/plan_layout.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

// `count` as a plan gives it for the messages from `source` to `destination`; 0, and recorded, if no plan can
// have it.
__device__ inline std::int32_t usable_messages(const LaneView& lane, std::int32_t count, int source,
                                               int destination) {
  const std::int64_t where = std::int64_t{source} * lane.ranks + destination;
  return valid_entry(lane, count, std::int64_t{lane.max_tokens} + 1, where) ? count : 0;
}

// The messages from `source` to `destination`.
__device__ inline std::int64_t messages_between(const LaneView& lane, const PlanView& plan, int source,
                                                int destination) {
  return usable_messages(lane, plan.tokens_between[std::int64_t{source} * lane.ranks + destination], source,
                         destination);
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
