// Counts the routes of many tokens in one launch of one cluster: each block counts in its own shared memory
// and reads the other blocks' counts there, so that no device memory has to be cleared.
#pragma once

#include <cstdint>

#include "backends/cuda/operations/dispatch_counts.hpp"
#include "plan/slot.hpp"

namespace ferry::cuda {

// [block] A barrier of all blocks of the cluster: arrives with release, waits with acquire.
__device__ inline void synchronize_cluster() {
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}

// [block] Calls use(token) for each token that falls to this thread of the cluster. Whole warps call it
// together; `token` is -1 in threads without one.
template <class Use>
__device__ __forceinline__ void for_each_token(std::int32_t tokens, Use use) {
  const auto step = static_cast<std::int32_t>(gridDim.x) * kClusterThreads;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  for (std::int32_t first = static_cast<std::int32_t>(blockIdx.x) * kClusterThreads + thread / 32 * 32;
       first < tokens; first += step) {
    const std::int32_t token = first + thread % 32;
    use(token < tokens ? token : -1);
  }
}

// [thread] The destinations of a token among the 32 ranks from `first_rank` on, one bit each. `first_slot`:
// index of its first id. count(id) counts a route and returns the expert's rank, or -1 for a route that this
// rank does not plan.
template <class Count>
__device__ __forceinline__ std::uint32_t destinations_of_token(const void* ids, bool wide_ids,
                                                               std::int64_t first_slot, int top_k,
                                                               int experts, int first_rank, Count count) {
  std::uint32_t ranks = 0;
  for (int slot = 0; slot < top_k; ++slot) {
    const std::int64_t id = wide_ids ? static_cast<const std::int64_t*>(ids)[first_slot + slot]
                                     : static_cast<const std::int32_t*>(ids)[first_slot + slot];
    if (classify_id(id, experts) != IdKind::expert) continue;
    const auto bit = static_cast<unsigned>(count(static_cast<int>(id)) - first_rank);
    if (bit < 32) ranks |= 1u << bit;
  }
  return ranks;
}

// [warp] Adds the number of threads that `count` to the counter in shared memory.
__device__ __forceinline__ void count_threads(bool counted, std::int32_t* counter) {
  const int threads = __popc(static_cast<int>(__ballot_sync(~0u, counted)));
  if (threadIdx.x % 32 == 0 && threads > 0) atomicAdd(counter, threads);
}

// The counter at the same place in the shared memory of block `block` of the cluster.
__device__ __forceinline__ const std::int32_t* counter_of(const std::int32_t* counter, unsigned block) {
  return static_cast<const std::int32_t*>(__cluster_map_shared_rank(counter, block));
}

// [block] Adds the other blocks' counts [count] to those of this one, the first.
__device__ __forceinline__ void add_counts_of_cluster(std::int32_t* counts, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kClusterThreads) {
    for (unsigned block = 1; block < gridDim.x; ++block) counts[i] += *counter_of(counts + i, block);
  }
}

}  // namespace ferry::cuda
