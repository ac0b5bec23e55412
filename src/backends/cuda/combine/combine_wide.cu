// Kernels of groups of more than kNarrowRanks ranks, for calls of every kind.
#define FERRY_WIDE_KERNELS
#include "backends/cuda/combine/combine.hpp"
#include "backends/cuda/combine/combine_kernel.cuh"

namespace ferry::cuda {
namespace {

const void* wide_kernel(Phase phase) {
  return phase == Phase::fused ? kernel<GenericCombine>()
                               : reinterpret_cast<const void*>(&combine_phase_kernel<GenericCombine>);
}

}  // namespace

void prepare_wide_combine() {
  for (const Phase phase : {Phase::fused, Phase::send}) allow_shared_bytes(wide_kernel(phase), kStreamsBytes);
}

void launch_wide_combine(const CombineArguments& arguments, const LaunchShape& shape, cudaStream_t stream) {
  launch(wide_kernel(arguments.phase), const_cast<CombineArguments*>(&arguments), kCombineThreads,
         kStreamsBytes, shape, stream, "launching combine");
}

}  // namespace ferry::cuda
