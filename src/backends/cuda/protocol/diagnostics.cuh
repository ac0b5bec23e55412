// Counters that kernels keep: traffic, and what they find for Exchange::check(). They never stop a call.
#pragma once

#include "backends/cuda/device/ptx.cuh"
#include "backends/cuda/protocol/lane_view.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

__device__ inline void add_wire(std::int64_t* count, unsigned long long more) {
  atomicAdd(reinterpret_cast<unsigned long long*>(count), more);
}

// [thread] Adds `more` findings of a kind that one thread of a call records. `store_position` is called for
// the first since the host's last report.
template <class StorePosition>
__device__ __forceinline__ void record_findings(FindingCount* found, unsigned long long more,
                                                StorePosition store_position) {
  const std::uint64_t report = load_relaxed_sys(&found->report);
  if (found->first_in != report) {
    store_position();
    found->first_in = report;
  }
  // The host that sees the count may read the position.
  fence_acq_rel_sys();
  found->count += more;
}

// [thread] Counts a damaged plan entry and keeps the lowest index.
static __device__ __noinline__ void record_bad_source(const LaneView& lane, std::int64_t index) {
  DeviceDiagnostics& found = lane.state->diagnostics;
  atomicMin(&found.first_bad_source, bad_source_key(load_relaxed_sys(&found.bad_sources.report), index));
  // As in record_findings().
  fence_acq_rel_sys();
  atomicAdd(&found.bad_sources.count, 1ull);
}

// Whether a plan's entry is in [0, limit). Kernels check every entry before they use it as an index.
__device__ __forceinline__ bool valid_entry(const LaneView& lane, std::int64_t value, std::int64_t limit,
                                            std::int64_t index) {
  if (value >= 0 && value < limit) return true;
  record_bad_source(lane, index);
  return false;
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
