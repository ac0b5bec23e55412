// The choice of replicas on a device.
#pragma once

#include "plan/replica_choice.hpp"

namespace ferry::cuda {

inline constexpr int kChoiceThreads = 256;

// [grid] A thread for each route, and for each scale.
__device__ inline void choose_replicas(const ReplicaChoice& call) {
  call.choose_share(
      static_cast<std::int32_t>(blockIdx.x) * kChoiceThreads + static_cast<std::int32_t>(threadIdx.x),
      static_cast<std::int32_t>(gridDim.x) * kChoiceThreads);
}

}  // namespace ferry::cuda
