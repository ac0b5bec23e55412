// Kernels of common calls without shared experts.
#include "backends/cuda/combine/kernels/combine_kernel.cuh"

namespace ferry::cuda {

const void* plain_combine_kernel(Reduction reduction, DType type, bool weights_travel) {
  return specialised_kernel<false>(reduction, type, weights_travel);
}

}  // namespace ferry::cuda
