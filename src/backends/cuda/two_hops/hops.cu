// The launch between the phases of a call in two hops, and its kernel for groups of up to kNarrowRanks ranks.
#include "backends/cuda/two_hops/pretended_hops.cuh"

namespace ferry::cuda {
namespace wide {
const void* hop_kernel_handle();  // hops_wide.cu
}

namespace {

const void* kernel_for(int ranks) {
  return takes_wide_kernels(ranks) ? wide::hop_kernel_handle() : hop_kernel_handle();
}

}  // namespace

void prepare_hops(int ranks) {
  load_kernel(kernel_for(ranks));
}

void launch_hops(const HopArguments& arguments, const LaunchShape& shape, cudaStream_t stream) {
  LaunchShape of = shape;
  of.blocks = hop_blocks(arguments, shape.blocks);
  launch({kernel_for(arguments.wires.ranks), kHopThreads, 0, "launch the hops of a call"}, &arguments, of,
         stream);
}

}  // namespace ferry::cuda
