// Combine on GPUs: the arguments of its kernels and their launches.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/device/lane_view.hpp"
#include "backends/cuda/dispatch/dispatch.hpp"
#include "backends/cuda/host/launch.hpp"
#include "layout/message.hpp"

namespace ferry::cuda {

struct CombineArguments {
  LaneView lane;
  CallTerms terms;
  PlanView plan;
  Reduction reduction;
  DType wire;
  CombineRowLayout row;  // of staging

  // The experts' rows.
  const std::byte* outputs;
  std::int64_t output_stride;
  DType output_type;
  const float* weights;     // one a row, or null
  const float* row_values;  // one a row, or null

  // At home.
  std::byte* result;
  std::int64_t result_stride;
  DType result_type;
  const float* topk_weights;  // [N, K], or null
  float* route_values;        // [N, K], or null

  bool weights_travel;  // home weights go to the rows first, in the same call: sums are made there
  bool own_staged;      // what this rank brings to itself goes through staging as well
  int senders;          // blocks of a fused launch of several that send
};

// On the current device, before the first launch.
void prepare_combine();

void launch_combine(const CombineArguments& arguments, Phase phase, const LaunchShape& shape,
                    cudaStream_t stream);

}  // namespace ferry::cuda
