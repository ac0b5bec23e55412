// Kernels for every kind of call, fused and split.
#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"
#include "backends/cuda/dispatch/kernels/dispatch_kernels.hpp"

namespace ferry::cuda {

const void* generic_kernel(Phase phase) {
  return phase == Phase::fused ? kernel<GenericDispatch>() : kernel_of_phases<GenericDispatch>();
}

}  // namespace ferry::cuda
