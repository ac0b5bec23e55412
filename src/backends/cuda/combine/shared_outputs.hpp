// Shared experts in combine: copies their rows out of the experts' outputs, for the caller or for a later
// phase.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/protocol/lane_view.hpp"

namespace ferry::cuda {

struct SharedOutputsArguments {
  LaneView lane;
  PlanView plan;
  const std::byte* outputs;
  std::int64_t output_stride;  // bytes
  DType output_type, combine_type;
  std::byte* to;  // [shared experts, N, H] of `type`; dropped rows and those of other ranks become +0
  DType type;
};

// Rows are rounded to the combine type, then to `type`. Does nothing with a plan that combine refuses.
// `blocks`: thread blocks at most.
void launch_shared_outputs(const SharedOutputsArguments& arguments, int blocks, cudaStream_t stream);

void prepare_shared_outputs();  // loads the kernels on the current device

}  // namespace ferry::cuda
