// Kernels of fused dispatches that quantise rows to a microscaled format.
#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"
#include "backends/cuda/dispatch/kernels/dispatch_kernels.hpp"

namespace ferry::cuda {

const void* microscaled_kernel(DispatchMode mode) {
  if (mode == DispatchMode::by_plan) return kernel<SpecialisedByPlan<Quantisation::microscaled>>();
  if (mode == DispatchMode::few_tokens) return kernel<SpecialisedDispatch<Quantisation::microscaled, true>>();
  return kernel<SpecialisedDispatch<Quantisation::microscaled, false>>();
}

}  // namespace ferry::cuda
