// Kernels of fused dispatches that quantise rows to NVFP4.
#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"
#include "backends/cuda/dispatch/kernels/dispatch_kernels.hpp"

namespace ferry::cuda {

const void* nvfp4_kernel(DispatchMode mode) {
  if (mode == DispatchMode::by_plan) return kernel<SpecialisedByPlan<Quantisation::nvfp4>>();
  if (mode == DispatchMode::few_tokens) return kernel<SpecialisedDispatch<Quantisation::nvfp4, true>>();
  return kernel<SpecialisedDispatch<Quantisation::nvfp4, false>>();
}

}  // namespace ferry::cuda
