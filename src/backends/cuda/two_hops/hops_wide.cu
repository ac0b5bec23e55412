// The kernel between the phases of a call in two hops, for groups of more than kNarrowRanks ranks.
#define FERRY_WIDE_KERNELS
#include "backends/cuda/two_hops/pretended_hops.cuh"

namespace ferry::cuda {
namespace {

__global__ void __launch_bounds__(kHopThreads, 1) wide_hop_kernel(const __grid_constant__ HopArguments call) {
  __shared__ HopState state;
  const Pretended transport = transport_of(call);
  HopBlock<Pretended>(call, transport, &state).run();
}

}  // namespace

const void* wide_hops() {
  return reinterpret_cast<const void*>(&wide_hop_kernel);
}

}  // namespace ferry::cuda
