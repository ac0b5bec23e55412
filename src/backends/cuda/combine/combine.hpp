// Combine on GPUs: the arguments of its kernels and their launches.
//
// The path of a call: the sender blocks (combine_send.cuh) send each expert output row, or the sum of a
// token's rows on this rank, to the token's source rank; there the reducer blocks (combine_reduce.cuh) add
// them up in a fixed order.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/dispatch/dispatch.hpp"
#include "backends/cuda/protocol/lane_view.hpp"
#include "backends/cuda/runtime/launch.hpp"
#include "layout/message.hpp"

namespace ferry::cuda {

struct CombineArguments {
  LaneView lane;
  Phase phase;
  AgreedOptions terms;
  PlanView plan;
  Reduction reduction;
  DType combine_type;    // of the rows that travel between ranks
  CombineRowLayout row;  // of a row in staging

  // Inputs: the experts' output rows on this rank.
  const std::byte* outputs;
  std::int64_t output_stride;  // bytes
  DType output_type;
  const float* row_weights;  // [rows] or null
  const float* row_values;   // [rows] or null

  // Results: this rank's tokens.
  std::byte* result;
  std::int64_t result_stride;  // bytes
  DType result_type;
  const float* topk_weights;  // [N, K] or null
  float* route_values;        // [N, K] or null

  bool weights_travel;  // topk_weights are first sent to the ranks that hold the rows, which sum there
  bool own_staged;      // rows of this rank's own tokens go through staging, like those of other ranks
  int senders;          // sender blocks of a fused launch of two or more blocks
};

// Sets the kernels' shared memory limits on the current device. Call once before the first launch.
void prepare_combine();

void launch_combine(const CombineArguments& arguments, const LaunchShape& shape, cudaStream_t stream);

}  // namespace ferry::cuda
