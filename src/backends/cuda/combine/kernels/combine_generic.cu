// Kernels of combine for every kind of call.
#include "backends/cuda/combine/kernels/combine_kernel.cuh"

namespace ferry::cuda {

const void* generic_combine_kernel(Phase phase) {
  return phase == Phase::fused ? kernel<GenericCombine>() : phase_kernel<GenericCombine>();
}

}  // namespace ferry::cuda
