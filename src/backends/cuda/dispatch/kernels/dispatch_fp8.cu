// Kernels of fused dispatches that quantise rows to fp8.
#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"
#include "backends/cuda/dispatch/kernels/dispatch_kernels.hpp"

namespace ferry::cuda {

const void* fp8_kernel(DispatchMode mode) {
  if (mode == DispatchMode::by_plan) return kernel<SpecialisedByPlan<Quantisation::fp8>>();
  if (mode == DispatchMode::few_tokens) return kernel<SpecialisedDispatch<Quantisation::fp8, true>>();
  return kernel<SpecialisedDispatch<Quantisation::fp8, false>>();
}

}  // namespace ferry::cuda
