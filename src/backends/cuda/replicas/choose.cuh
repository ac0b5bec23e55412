// The choice of replicas on a device.
#pragma once

#include "plan/replica_choice.hpp"

namespace ferry::cuda {

inline constexpr int kChoiceThreads = 256;

// [grid] A thread for each route, and for each scale.
__device__ inline void choose_replicas(const ReplicaChoice& call) {
  const auto threads = static_cast<std::int32_t>(gridDim.x) * kChoiceThreads,
             thread = static_cast<std::int32_t>(blockIdx.x) * kChoiceThreads +
                      static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t routes = call.routes();
  for (std::int32_t route = thread; route < routes; route += threads) call.choose(route);
  for (std::int32_t i = thread; i < call.scale_count; i += threads) call.choose_scale(i);
}

}  // namespace ferry::cuda
