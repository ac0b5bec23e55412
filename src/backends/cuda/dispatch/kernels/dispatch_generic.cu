// Kernels of the send phase, of the receive phase, and of fused dispatches that compute values of rows.
#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"
#include "backends/cuda/dispatch/kernels/dispatch_kernels.hpp"

namespace ferry::cuda {

const void* generic_kernel(DispatchMode mode) {
  if (mode == DispatchMode::generic) return kernel<GenericDispatch>();
  return reinterpret_cast<const void*>(&dispatch_phase_kernel<GenericDispatch>);
}

}  // namespace ferry::cuda
