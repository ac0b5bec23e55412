// Kernels for groups of more than kNarrowRanks ranks; generic, for every kind of call.
#define FERRY_WIDE_KERNELS
#include "backends/cuda/combine/kernels/combine_kernel.cuh"

namespace ferry::cuda {

const void* wide_combine_kernel(Phase phase) {
  return phase == Phase::fused ? kernel<GenericCombine>() : phase_kernel<GenericCombine>();
}

}  // namespace ferry::cuda
