// Counters that kernels keep: traffic, and damaged plan entries for Exchange::check(). They never stop a
// call.
#pragma once

#include "backends/cuda/protocol/lane_view.hpp"

namespace ferry::cuda {

__device__ inline void add_wire(std::int64_t* count, unsigned long long more) {
  atomicAdd(reinterpret_cast<unsigned long long*>(count), more);
}

// Counts a damaged plan entry and keeps the lowest index.
__device__ __forceinline__ void record_bad_source(const LaneView& lane, std::int64_t index) {
  atomicAdd(&lane.state->diagnostics.bad_sources, 1ull);
  atomicMin(&lane.state->diagnostics.first_bad_source, static_cast<unsigned long long>(index));
}

// Whether a plan's entry is in [0, limit). Kernels check every entry before they use it as an index.
__device__ __forceinline__ bool valid_entry(const LaneView& lane, std::int64_t value, std::int64_t limit,
                                            std::int64_t index) {
  if (value >= 0 && value < limit) return true;
  record_bad_source(lane, index);
  return false;
}

}  // namespace ferry::cuda
