// Kernels of fused dispatches that quantise rows to an MX format.
#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"
#include "backends/cuda/dispatch/kernels/dispatch_kernels.hpp"

namespace ferry::cuda {

const void* mx_kernel(DispatchMode mode) {
  if (mode == DispatchMode::by_plan) return kernel<SpecialisedByPlan<Quantisation::mx>>();
  if (mode == DispatchMode::few_tokens) return kernel<SpecialisedDispatch<Quantisation::mx, true>>();
  return kernel<SpecialisedDispatch<Quantisation::mx, false>>();
}

}  // namespace ferry::cuda
