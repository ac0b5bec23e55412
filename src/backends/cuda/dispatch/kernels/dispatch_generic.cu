// Kernels of the send phase, of the receive phase, and of fused dispatches that compute values of rows.
#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"
#include "backends/cuda/dispatch/kernels/dispatch_kernels.hpp"

namespace ferry::cuda {

const void* generic_kernel(DispatchMode mode) {
  if (mode == DispatchMode::send_phase) return kernel<Phase::send, GenericDispatch>();
  if (mode == DispatchMode::receive_phase) return kernel<Phase::receive, GenericDispatch>();
  return kernel<Phase::fused, GenericDispatch>();
}

}  // namespace ferry::cuda
