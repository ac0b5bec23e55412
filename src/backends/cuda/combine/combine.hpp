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

// Rows that an engine carries, in the phases of a call. Senders pack them behind one another, first those for
// rank 0. Each row carries its index in staging and its flags; once the rows have been transferred, the
// source rank looks up where each index has arrived.
struct PackedRows {
  std::byte* outbox;  // null: no engine, rows are stored where the source rank reads them
  std::int32_t row_bytes, flags_offset, index_offset;
  const std::int32_t* first_row;  // [R, T] of each message, among the rows for its source rank
  const std::int32_t* rows;       // [R] for each source rank
  const LLPacket* arrived;        // by index in staging: the call in which the row has arrived, its address
  const Flag* absent;             // the flags of a row that has not arrived
  std::int64_t most_rows;         // in the outbox
};

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
  PackedRows packed;
};

// Sets the kernels' shared memory limits on the current device. Call once before the first launch.
void prepare_combine();

void launch_combine(const CombineArguments& arguments, const LaunchShape& shape, cudaStream_t stream);

}  // namespace ferry::cuda
