// Kernels of a fused dispatch by a plan.
#include "backends/cuda/dispatch/dispatch_kernel.cuh"
#include "backends/cuda/dispatch/dispatch_kernels.hpp"

namespace ferry::cuda {

const void* by_plan_kernel(bool quantises) {
  return quantises ? kernel<Phase::fused, SpecialisedByPlan<true>>()
                   : kernel<Phase::fused, SpecialisedByPlan<false>>();
}

}  // namespace ferry::cuda
