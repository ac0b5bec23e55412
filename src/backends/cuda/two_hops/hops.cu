// The launch between the phases of a call in two hops, and its kernel for groups of up to kNarrowRanks ranks.
#include "backends/cuda/runtime/error.hpp"
#include "backends/cuda/two_hops/header_calls.hpp"
#include "backends/cuda/two_hops/pretended_hops.cuh"

namespace ferry::cuda {
namespace {

__global__ void __launch_bounds__(kHopThreads, 1) hop_kernel(const __grid_constant__ HopArguments call) {
  __shared__ HopState state;
  const Pretended transport = transport_of(call);
  HopBlock<Pretended>(call, transport, &state).run();
}

}  // namespace

void prepare_hops() {
  prepare_header_calls();
  prepare_wide_hops();
  load_kernels(&hop_kernel);
}

void launch_hops(const HopArguments& arguments, const LaunchShape& shape, cudaStream_t stream) {
  LaunchShape of = shape;
  of.blocks = hop_blocks(arguments, shape.blocks);
  if (takes_wide_kernels(arguments.wires.ranks)) return launch_wide_hops(arguments, of, stream);
  launch(reinterpret_cast<const void*>(&hop_kernel), const_cast<HopArguments*>(&arguments), kHopThreads, 0,
         of, stream, "launch the hops of a call");
}

}  // namespace ferry::cuda
