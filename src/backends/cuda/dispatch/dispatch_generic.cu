// Kernels of the send phase, of the receive phase, and of fused dispatches that compute values of rows.
#include "backends/cuda/dispatch/dispatch_kernel.cuh"
#include "backends/cuda/dispatch/dispatch_kernels.hpp"

namespace ferry::cuda {

const void* generic_kernel(Phase phase) {
  switch (phase) {
    case Phase::send:
      return kernel<Phase::send, GenericDispatch>();
    case Phase::receive:
      return kernel<Phase::receive, GenericDispatch>();
    case Phase::fused:
      break;
  }
  return kernel<Phase::fused, GenericDispatch>();
}

}  // namespace ferry::cuda
