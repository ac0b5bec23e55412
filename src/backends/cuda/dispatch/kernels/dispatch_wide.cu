// Kernels for groups of more than kNarrowRanks ranks, for every kind of call. Messages are indexed by number,
// whole rows are sent, and all go through staging.
#define FERRY_WIDE_KERNELS
#include "backends/cuda/dispatch/kernels/dispatch_kernel.cuh"

namespace ferry::cuda {

const void* wide_dispatch_kernel(Phase phase) {
  return phase == Phase::fused ? fused_kernel<GenericDispatch>() : split_kernel<GenericDispatch>();
}

std::int64_t lay_out_wide_block(DispatchArguments* call) {
  return lay_out_block(call);
}

}  // namespace ferry::cuda
