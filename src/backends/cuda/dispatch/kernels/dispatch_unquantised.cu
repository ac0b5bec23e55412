// Kernels of fused dispatches whose rows are moved unchanged.
#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"
#include "backends/cuda/dispatch/kernels/dispatch_kernels.hpp"

namespace ferry::cuda {

const void* unquantised_kernel(DispatchMode mode) {
  if (mode == DispatchMode::by_plan) return kernel<SpecialisedByPlan<Quantisation::none>>();
  if (mode == DispatchMode::few_tokens) return kernel<SpecialisedDispatch<Quantisation::none, true>>();
  return kernel<SpecialisedDispatch<Quantisation::none, false>>();
}

}  // namespace ferry::cuda
