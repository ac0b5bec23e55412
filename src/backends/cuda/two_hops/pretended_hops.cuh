// The launch between the phases of a call in two hops where nodes are simulated. Included once by each file
// that compiles it: hops.cu for narrow kernels, hops_wide.cu for wide ones.
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

__global__ void __launch_bounds__(kHopThreads, 1) hop_kernel(const __grid_constant__ HopArguments call) {
  __shared__ HopState state;
  const Pretended transport = transport_of(call);
  HopBlock<Pretended>(call, transport, &state).run();
}

const void* hop_kernel_handle() {
  return reinterpret_cast<const void*>(&hop_kernel);
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
