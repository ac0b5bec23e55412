// Kernels of a fused dispatch from ids, of many tokens and of few.
#include "backends/cuda/dispatch/dispatch_kernel.cuh"
#include "backends/cuda/dispatch/dispatch_kernels.hpp"

namespace ferry::cuda {

const void* many_tokens_kernel(bool quantises) {
  return quantises ? kernel<Phase::fused, SpecialisedDispatch<true, false>>()
                   : kernel<Phase::fused, SpecialisedDispatch<false, false>>();
}

const void* few_tokens_kernel(bool quantises) {
  return quantises ? kernel<Phase::fused, SpecialisedDispatch<true, true>>()
                   : kernel<Phase::fused, SpecialisedDispatch<false, true>>();
}

}  // namespace ferry::cuda
