// The numbers of messages between this rank and each other rank, as a warp needs them.
#pragma once

#include "backends/cuda/protocol/plan_entries.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// Narrow: thread r holds the messages of rank r. Wide: read from the plan when they are asked for.
struct PeerMessages {
  std::int32_t mine = 0;  // narrow: of the rank with this thread's number
  // Wide:
  const LaneView* lane = nullptr;
  const std::int32_t* tokens_between = nullptr;  // of the plan
  bool sent = false;                             // messages to the rank; otherwise from it
  bool own = true;                               // counts those of this rank to itself

  // [thread] Wide: the messages with `rank`, checked.
  __device__ __forceinline__ std::int32_t with(int rank) const {
    if (!own && rank == lane->rank) return 0;
    const int source = sent ? lane->rank : rank, destination = sent ? rank : lane->rank;
    return usable_messages(*lane, tokens_between[std::int64_t{source} * lane->ranks + destination], source,
                           destination);
  }
  // [warp] The messages with `rank`, which may differ between threads.
  __device__ __forceinline__ std::int32_t of(int rank) const {
    if constexpr (kWide) return with(rank);
    return __shfl_sync(~0u, mine, rank);
  }
  // [warp] The messages with all ranks together.
  __device__ __forceinline__ std::int32_t sum() const {
    if constexpr (kWide) {
      std::int32_t all = 0;
      for (int rank = static_cast<int>(threadIdx.x % 32); rank < lane->ranks; rank += 32) all += with(rank);
      return __reduce_add_sync(~0u, all);
    }
    return __reduce_add_sync(~0u, mine);
  }
  // [warp] The messages with the rank that has the most.
  __device__ __forceinline__ std::int32_t most() const {
    if constexpr (kWide) {
      std::int32_t largest = 0;
      for (int rank = static_cast<int>(threadIdx.x % 32); rank < lane->ranks; rank += 32)
        largest = max(largest, with(rank));
      return __reduce_max_sync(~0u, largest);
    }
    return __reduce_max_sync(~0u, mine);
  }
};

}  // namespace ferry::cuda::inline FERRY_WIDTH
