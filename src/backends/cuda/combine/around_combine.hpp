// Launches before and after the kernel of a combine, so that calls without them run unchanged kernels.
#pragma once

#include "backends/cuda/protocol/lane_view.hpp"
#include "backends/cuda/runtime/launch.hpp"

namespace ferry::cuda {

// Before: copies the rows of shared experts out of the experts' outputs, for the caller or for a later phase.
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
extern const Kernel<SharedOutputsArguments> kSharedOutputsKernel;

// After: the epilogue (CombineOptions::epilogue).
struct EpilogueArguments {
  LaneView lane;
  PlanView plan;
  std::byte* result;           // [N, H] of `type`
  std::int64_t result_stride;  // bytes
  DType type;
  const std::byte* residual;  // the same, or null
  std::int64_t residual_stride;
  float scale;
};

// Each value y of the result becomes round(fma(scale, y, r)). Writes nothing if the combine was aborted.
extern const Kernel<EpilogueArguments> kEpilogueKernels[3];  // by `type`

}  // namespace ferry::cuda
