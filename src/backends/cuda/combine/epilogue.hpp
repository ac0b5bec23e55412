// The epilogue of combine (CombineOptions::epilogue) on GPUs: a launch of its own after the combine, so that
// calls without an epilogue run unchanged kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/protocol/lane_view.hpp"

namespace ferry::cuda {

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
// `blocks`: thread blocks at most.
void launch_epilogue(const EpilogueArguments& arguments, int blocks, cudaStream_t stream);

void prepare_epilogue();  // loads the kernels on the current device

}  // namespace ferry::cuda
