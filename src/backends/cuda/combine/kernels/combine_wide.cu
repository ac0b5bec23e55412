// Kernels for groups of more than kNarrowRanks ranks; generic, for every kind of call.
#define FERRY_WIDE_KERNELS
#include "backends/cuda/combine/kernels/combine_kernel.cuh"
#include "backends/cuda/combine/kernels/combine_kernels.hpp"

namespace ferry::cuda {
namespace {

const void* wide_kernel(Phase phase) {
  return phase == Phase::fused ? kernel<GenericCombine>() : phase_kernel<GenericCombine>();
}

}  // namespace

void prepare_wide_combine() {
  for (const Phase phase : {Phase::fused, Phase::send}) allow_shared_bytes(wide_kernel(phase), kStreamsBytes);
}

void launch_wide_combine(const CombineArguments& arguments, const LaunchShape& shape, cudaStream_t stream) {
  launch(wide_kernel(arguments.phase), const_cast<CombineArguments*>(&arguments), kCombineThreads,
         kStreamsBytes, shape, stream, "launch combine");
}

}  // namespace ferry::cuda
