// Kernels of common calls that add the rows of shared experts.
#include "backends/cuda/combine/kernels/combine_kernel.cuh"

namespace ferry::cuda {

const void* shared_combine_kernel(Reduction reduction, DType type, bool weights_travel) {
  return specialised_kernel<true>(reduction, type, weights_travel);
}

}  // namespace ferry::cuda
