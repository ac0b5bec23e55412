// Kernels for groups of more than kNarrowRanks ranks; generic, for every kind of call.
#define FERRY_WIDE_KERNELS
#include "backends/cuda/combine/combine.hpp"
#include "backends/cuda/combine/combine_block.cuh"
#include "backends/cuda/combine/kernels/combine_kernels.hpp"

namespace ferry::cuda {
namespace {

__global__ void __launch_bounds__(kCombineThreads, 1)
    wide_combine_kernel(const __grid_constant__ CombineArguments arguments) {
  __shared__ CombineBlockState state;
  run_combine_block<Phase::fused, GenericCombine>(arguments, &state);
}

__global__ void __launch_bounds__(kCombineThreads, 1)
    wide_combine_phase_kernel(const __grid_constant__ CombineArguments arguments) {
  __shared__ CombineBlockState state;
  if (arguments.phase == Phase::send) {
    run_combine_block<Phase::send, GenericCombine>(arguments, &state);
  } else {
    run_combine_block<Phase::receive, GenericCombine>(arguments, &state);
  }
}

const void* wide_kernel(Phase phase) {
  return phase == Phase::fused ? reinterpret_cast<const void*>(&wide_combine_kernel)
                               : reinterpret_cast<const void*>(&wide_combine_phase_kernel);
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
