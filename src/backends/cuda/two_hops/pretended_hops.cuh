// Which ranks a launch between the phases treats as if they were on another host.
#pragma once

#include "backends/cuda/two_hops/hop_block.cuh"

namespace ferry::cuda {

// Nodes of one host are pretended: ranks of other nodes are mapped, and treated as if they were not.
__device__ inline Pretended transport_of(const HopArguments& call) {
  Pretended transport{};
  for (int rank = 0; rank < call.wires.ranks; ++rank) {
    if (call.topology.node[rank] != call.topology.node[call.wires.rank]) transport.remote.add(rank);
  }
  return transport;
}

}  // namespace ferry::cuda
