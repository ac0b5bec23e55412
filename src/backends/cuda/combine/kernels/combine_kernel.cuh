// The kernel of combine, for a call in one launch and for one in phases.
#pragma once

#include "backends/cuda/combine/combine_block.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {
namespace {

template <class Traits>
__global__ void __launch_bounds__(kCombineThreads, 1)
    combine_kernel(const __grid_constant__ CombineArguments arguments) {
  __shared__ CombineBlockState state;
  run_combine_block<Phase::fused, Traits>(arguments, &state);
}

// The phases of a split call are one kernel, so that a profiler lists both under one name.
template <class Traits>
__global__ void __launch_bounds__(kCombineThreads, 1)
    combine_phase_kernel(const __grid_constant__ CombineArguments arguments) {
  __shared__ CombineBlockState state;
  if (arguments.phase == Phase::send) {
    run_combine_block<Phase::send, Traits>(arguments, &state);
  } else {
    run_combine_block<Phase::receive, Traits>(arguments, &state);
  }
}

template <class Traits>
const void* kernel() {
  return reinterpret_cast<const void*>(&combine_kernel<Traits>);
}

template <class Traits>
const void* phase_kernel() {
  return reinterpret_cast<const void*>(&combine_phase_kernel<Traits>);
}

// The kernel of a reduction, with weights that travel or without, for rows and results of one type.
template <bool kShared, Reduction kReduction, bool kWeights>
const void* specialised_kernel(DType type) {
  switch (type) {
    case DType::bf16:
      return kernel<SpecialisedCombine<kReduction, DType::bf16, kWeights, kShared>>();
    case DType::fp16:
      return kernel<SpecialisedCombine<kReduction, DType::fp16, kWeights, kShared>>();
    case DType::fp32:
      break;
  }
  return kernel<SpecialisedCombine<kReduction, DType::fp32, kWeights, kShared>>();
}

template <bool kShared>
const void* specialised_kernel(Reduction reduction, DType type, bool weights_travel) {
  if (reduction == Reduction::exact) return specialised_kernel<kShared, Reduction::exact, false>(type);
  return weights_travel ? specialised_kernel<kShared, Reduction::partial, true>(type)
                        : specialised_kernel<kShared, Reduction::partial, false>(type);
}

}  // namespace
}  // namespace ferry::cuda::inline FERRY_WIDTH
