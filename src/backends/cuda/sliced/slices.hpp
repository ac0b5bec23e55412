// Experts in slices (Placement::ep_tp) on GPUs: the kernels that run between the calls of the lane inside.
//
// The lane inside routes a slice of the tokens and gathers within the sub-group (SlicedLane). These kernels
// choose the slice, compute row positions, and pack and unpack rows. None of them waits for another rank.
#pragma once

#include "backends/cuda/protocol/lane_view.hpp"
#include "backends/cuda/runtime/launch.hpp"
#include "exchange/slice_fault.hpp"
#include "format/parts.hpp"

namespace ferry::cuda {

// An exchange of experts in slices, as its kernels see it. The experts of the lane inside are slices: slice i
// of expert e is its expert e * tp + i.
struct SliceShape {
  std::int32_t tp, experts;                  // experts of the whole group
  std::int32_t first_expert, local_experts;  // of this rank's sub-group, which are consecutive
  std::int32_t alignment, max_tokens;
  std::int64_t capacity;  // rows that this rank has room for
  bool zero_padding;
};

// A rank's terms of a call. All ranks compare the same words, so all reach the same conclusion.
struct SliceTerms {
  std::int64_t tokens;      // dispatch: N; combine: of the plan
  std::uint64_t ids_hash;   // dispatch
  std::int64_t rows;        // combine: of its sub-group, by the plan
  std::int32_t types;       // combine: of outputs and result
  std::uint32_t arguments;  // combine: bits below
};
inline constexpr std::uint32_t kHasOutputs = 1, kHasResult = 2, kPlanDamaged = 4;

// State of the call in flight, in device memory. All 0 if the call has been refused or its ranks differ.
struct SliceState {
  std::int32_t first, count;  // the tokens of this rank's sub-group that this rank sends
  std::int32_t slots;         // combine: rows of the result, of `count` tokens
  std::int32_t own_rows;      // received by this rank before the gather
  std::int32_t gathered;      // received by all ranks of its sub-group
  std::int32_t tokens;        // N of the sub-group
};

// Totals over all calls of a lane, in device memory that starts as zeros.
struct SliceTotals {
  std::uint64_t dispatches;
  DeviceWireCounts wire;  // sent by the gathers
};

// Segments: the rows that one rank sent for one expert, which are consecutive in both orders. Segment (i *
// local experts + local) * ep + j is that of rank j * tp + i.
struct SegmentTables {
  std::int32_t* gathered_row;  // [segments + 1] first row as all_gather_v places it
  std::int32_t* row;           // [segments] first row in the order of the contract
  std::int32_t* pair_rows;     // [tp * local experts] rows of a tp rank's senders for an expert
  std::int32_t* pair_first;    // [tp * local experts] the first of them, gathered
  std::int32_t* group_first;   // [local experts] first row of the expert
};

// Writes this rank's terms of a dispatch.
struct PostDispatchArguments {
  LaneView lane;
  const void* ids;
  bool wide_ids;
  std::int64_t tokens;                // N; with device_tokens the most it may be
  const std::int32_t* device_tokens;  // or null
  SliceTerms* terms;
};

// Compares the ranks' terms of a dispatch, and takes this rank's slice of ids and weights.
struct TakeSliceArguments {
  LaneView lane;
  SliceShape shape;
  const SliceTerms* terms;  // [R]
  bool may_be_aborted;      // the call that has gathered the terms, in a kernel
  const void* ids;
  bool wide_ids;
  const float* weights;  // [N, K] or null
  std::int64_t* slice_ids;
  float* slice_weights;
  SliceState* state;
};

// Copies this rank's slice of the tokens, if its choice is known on the device only.
struct CopyTokensArguments {
  const SliceState* state;
  int parts;
  const std::byte* from[kMaxParts];
  std::byte* to[kMaxParts];  // dense
  std::int64_t stride[kMaxParts], row_bytes[kMaxParts];
};

// Finds the segments from a plan's counts, and publishes the counts and row offsets of a dispatch.
struct FindSegmentsArguments {
  LaneView lane;
  SliceShape shape;
  PlanView plan;
  SegmentTables tables;
  SliceState* state;
  // Of a dispatch; null in a combine.
  std::int32_t* counts;       // [local experts]
  std::int32_t* row_offsets;  // [local experts + 1]
  HostTotals* totals;
  SliceTotals* all_calls;
  // Of a combine; null in a dispatch.
  SliceTerms* terms;
  std::int32_t types;
  std::uint32_t arguments;
};

// Packs the rows that this rank has received, each followed by its source and weight.
struct PackRowsArguments {
  LaneView lane;
  SliceShape shape;
  const SliceState* state;
  const SliceTerms* terms;  // [R]
  int parts;
  const std::byte* from[kMaxParts];
  std::int64_t part_bytes[kMaxParts];  // of a row
  const Source* sources;
  const float* weight;  // or null
  std::byte* to;
  std::int64_t row_bytes;
};

// The tail of a packed row.
struct SliceRowTail {
  Source source;  // its token is one of all N
  float weight;
};

// Unpacks the rows of the sub-group in the order of the contract, and writes the padding.
struct UnpackRowsArguments {
  LaneView lane;
  SliceShape shape;
  const SliceState* state;
  SegmentTables tables;
  const std::int32_t *counts, *row_offsets;
  const std::byte* from;
  std::int64_t row_bytes;
  int parts;
  std::byte* to[kMaxParts];
  std::int64_t part_bytes[kMaxParts];
  Source* sources;
  SliceTotals* all_calls;
  float* weight;               // or null
  std::int32_t* group_of_row;  // or null
};

// Compares the ranks' terms of a combine, and takes this rank's slice of the weights.
struct TakeCombineArguments {
  LaneView lane;
  SliceShape shape;
  const SliceTerms* terms;    // [R]
  bool may_be_aborted;        // as above
  const float* topk_weights;  // [N, K] or null
  float* slice_weights;
  std::int32_t slots;  // rows of the result for a token
  // For wire_counts().
  std::int64_t output_bytes, result_bytes;  // of a row
  SliceTotals* all_calls;
  SliceState* state;
};

// Copies the experts' outputs in gathered order, as they are or as fp32, and this rank's row weights.
struct PackOutputsArguments {
  SliceShape shape;
  std::int32_t rank, ranks, hidden;
  const SliceState* state;
  SegmentTables tables;
  const std::byte* outputs;
  std::int64_t output_stride;
  DType output_type, type;  // as passed, and as packed
  std::byte* to;
  const float* row_weights;  // or null
  float* own_weights;
};

// Copies the results of all N tokens to where the caller wants them.
struct CopyResultsArguments {
  const SliceState* state;
  std::int32_t slots;  // rows of a token
  const std::byte* from;
  std::byte* to;
  std::int64_t stride, row_bytes;
};

extern const Kernel<PostDispatchArguments> kPostDispatchKernel;
extern const Kernel<TakeSliceArguments> kTakeSliceKernel;
extern const Kernel<CopyTokensArguments> kCopyTokensKernel;
extern const Kernel<FindSegmentsArguments> kFindSegmentsKernel;
extern const Kernel<PackRowsArguments> kPackRowsKernel;
extern const Kernel<UnpackRowsArguments> kUnpackRowsKernel;
extern const Kernel<TakeCombineArguments> kTakeCombineKernel;
extern const Kernel<PackOutputsArguments> kPackOutputsKernel;
extern const Kernel<CopyResultsArguments> kCopyResultsKernel;

}  // namespace ferry::cuda
