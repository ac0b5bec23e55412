// The transport of simulated nodes.
#pragma once

#include "backends/cuda/two_hops/hop_block.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// Treats the ranks of other nodes, which are on this host and mapped, as if they were not mapped.
__device__ inline Pretended transport_of(const HopArguments& call) {
  Pretended transport{};
  for (int rank = 0; rank < call.wires.ranks; ++rank) {
    if (call.topology.node[rank] != call.topology.node[call.wires.rank]) transport.remote.add(rank);
  }
  return transport;
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
