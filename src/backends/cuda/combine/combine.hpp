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
#include "layout/exchange_layout.hpp"

namespace ferry::cuda {

// Rows that a carrier moves between the phases of a call. Senders pack them contiguously, first those for
// rank 0. Each row carries a label with its index in staging. After the transfer the source rank records the
// address of the row for each index, and sets the row's flags.
struct PackedRows {
  std::byte* outbox;  // null: no carrier, rows are stored where the source rank reads them
  std::int32_t row_bytes, label_offset;
  const std::int32_t* first_row;  // [R, T] of each message, among the rows for its source rank
  const std::int32_t* rows;       // [R] for each source rank
  const LLPacket* arrived;        // by index in staging: the call in which the row has arrived, its address
  std::int64_t most_rows;         // in the outbox
};

// The label of a packed row: a row of an earlier call has another one, unless it is 2^32 calls older.
FERRY_HD constexpr std::uint64_t packed_label(std::uint64_t call, std::int64_t index) {
  return call << 32 | static_cast<std::uint32_t>(index);
}

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
  // The result is the call's residual: generic kernels store round(fma(scale, y, r)), r of the result as it
  // is and y the value that the call would store, for each value once. Another residual: kEpilogueKernels.
  bool adds_to_result;
  float scale;
  const float* topk_weights;  // [N, K] or null
  float* route_values;        // [N, K] or null

  // Shared experts whose rows the reducers add after all others; 0: none. The rows are in `outputs`, or
  // copied [shared experts, N, H] in the combine type, if the outputs have another type or a later phase adds
  // them.
  int shared_terms;
  const std::byte* kept_shared_rows;  // or null

  bool weights_travel;  // topk_weights are first sent to the ranks that hold the rows, which sum there
  bool own_staged;      // rows of this rank's own tokens go through staging, like those of other ranks
  int senders;          // sender blocks of a fused launch of two or more blocks
  PackedRows packed;
};

// Whether the sums of all ranks for a token and its shared rows together are at most 32, one for each thread
// of a warp.
inline bool shared_terms_fit(const CombineArguments& call) {
  return call.lane.most_ranks + call.shared_terms <= 32;
}

// Sets the kernels' shared memory limits on the current device, for groups of that size. Call once before the
// first launch.
void prepare_combine(int ranks);

void launch_combine(const CombineArguments& arguments, const LaunchShape& shape, cudaStream_t stream);

// Launches before and after the kernel of a combine, so that calls without them run unchanged kernels.
//
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
