// What kernels count: what they sent, and for check() what was wrong, with its lowest place; never a reason
// to stop.
#pragma once

#include "backends/cuda/device/lane_view.hpp"

namespace ferry::cuda {

__device__ inline void add_wire(std::int64_t* count, unsigned long long more) {
  atomicAdd(reinterpret_cast<unsigned long long*>(count), more);
}

__device__ __forceinline__ void record_bad_source(const LaneView& lane, std::int64_t where) {
  atomicAdd(&lane.state->found.bad_sources, 1ull);
  atomicMin(&lane.state->found.first_bad_source, static_cast<unsigned long long>(where));
}

// Entries of plans are looked at before they are used.
__device__ __forceinline__ bool usable(const LaneView& lane, std::int64_t value, std::int64_t limit,
                                       std::int64_t where) {
  if (value >= 0 && value < limit) return true;
  record_bad_source(lane, where);
  return false;
}

}  // namespace ferry::cuda
