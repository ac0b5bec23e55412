// Experts in slices (Placement::ep_tp): the steps between the calls of the lane inside, which routes a slice
// of the tokens and gathers within the sub-group. They choose the slice, compute row positions, and pack and
// unpack rows. None of them waits for another rank. On the host a step is a loop, on a device a kernel.
#pragma once

#include <cstdint>

#include "exchange/backend.hpp"
#include "exchange/faults.hpp"
#include "format/parts.hpp"
#include "layout/plan_layout.hpp"

namespace ferry::sliced {

inline constexpr std::int64_t kSliceAlignment = 256;  // of arrays, in bytes

// Offsets of a lane's arrays in its memory. The size query and the construction both use this.
struct SlicedArrays {
  std::int64_t parts = 0, source = 0, weight = 0, counts = 0, row_offsets = 0, group_expert = 0;
  std::int64_t result_bytes = 0;  // bytes of all arrays above
  std::int64_t state = 0;
  std::int64_t all_calls = 0;  // SliceTotals
  std::int64_t terms = 0;      // of this rank, then of all ranks
  std::int64_t ids = 0;        // int64 [T / tp, K] of the slice
  std::int64_t weights = 0;    // fp32 [T / tp, K]
  std::int64_t tokens = 0;     // of the slice, whose choice is known on the device only
  std::int64_t segments = 0;   // SegmentTables
  std::int64_t own = 0;        // what this rank contributes to a gather, or takes from one that adds
  std::int64_t all = 0;        // the same for the whole sub-group
  std::int64_t row_weights = 0;
  std::int64_t bytes = 0;
};
SlicedArrays sliced_arrays(const Config& config, int rank);

// An exchange of experts in slices, as its steps see it. The experts of the lane inside are slices: slice i
// of expert e is its expert e * tp + i.
struct SliceShape {
  std::int32_t rank, ranks, tp, top_k;
  std::int32_t experts;                      // of the whole group
  std::int32_t first_expert, local_experts;  // of this rank's sub-group, which are consecutive
  std::int32_t alignment, max_tokens, hidden;
  std::int64_t capacity;  // rows that this rank has room for
  bool zero_padding;

  FERRY_HD int tp_rank() const { return rank % tp; }
  FERRY_HD int sub_groups() const { return ranks / tp; }
  FERRY_HD int pairs() const { return tp * local_experts; }
  FERRY_HD int segments() const { return local_experts * ranks; }
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

// State of the call in flight. All 0 if the call has been refused or its ranks differ.
struct SliceState {
  std::int32_t first, count;  // the tokens of this rank's sub-group that this rank sends
  std::int32_t slots;         // combine: rows of the result, of `count` tokens
  std::int32_t own_rows;      // received by this rank before the gather
  std::int32_t gathered;      // received by all ranks of its sub-group
  std::int32_t tokens;        // N of the sub-group
};

// Totals over all calls of a lane, in memory that starts as zeros.
struct SliceTotals {
  std::uint64_t dispatches;
  // Sent by the gathers.
  std::int64_t dispatch_bytes, dispatch_messages, combine_bytes, combine_messages;
};

// Segments: the rows that one rank sent for one expert, which are consecutive in both orders. Segment (i *
// local experts + local) * sub-groups + j is that of rank j * tp + i. Pair i * local experts + local has the
// segments of one tp rank's senders for an expert.
struct SegmentTables {
  std::int32_t* gathered_row;  // [segments + 1] first row as all_gather_v places it
  std::int32_t* row;           // [segments] first row in the order of the contract
  std::int32_t* pair_rows;     // [tp * local experts]
  std::int32_t* pair_first;    // [tp * local experts] the first of them, gathered
  std::int32_t* group_first;   // [local experts] first row of the expert
};

// Writes this rank's terms of a dispatch.
struct PostDispatch {
  SliceShape shape;
  const void* ids;
  bool wide_ids;
  std::int64_t tokens;                // N; with device_tokens the most it may be
  const std::int32_t* device_tokens;  // or null
  SliceTerms* terms;
};

// Compares the ranks' terms of a dispatch, and takes this rank's slice of ids and weights.
struct TakeSlice {
  SliceShape shape;
  const SliceTerms* terms;  // [R]
  const void* ids;
  bool wide_ids;
  const float* weights;  // [N, K] or null
  std::int64_t* slice_ids;
  float* slice_weights;
  SliceState* state;
};

// Copies this rank's slice of the tokens, if its choice is known on the device only.
struct CopyTokens {
  const SliceState* state;
  int parts;
  const std::byte* from[kMaxParts];
  std::byte* to[kMaxParts];  // dense
  std::int64_t stride[kMaxParts], row_bytes[kMaxParts];
};

// Finds the segments from a plan's counts, and publishes the counts and row offsets of a dispatch.
struct FindSegments {
  SliceShape shape;
  PlanView plan;
  SegmentTables tables;
  SliceState* state;
  // Arrays of a dispatch; null in a combine.
  std::int32_t* counts;       // [local experts]
  std::int32_t* row_offsets;  // [local experts + 1]
  HostTotals* totals;
  SliceTotals* all_calls;
  std::uint64_t call;  // its number on the host; a device counts its dispatches itself
  // Arrays of a combine; null in a dispatch.
  SliceTerms* terms;
  std::int32_t types;
  std::uint32_t arguments;

  // Rows from rank source * tp + tp_rank for a local expert.
  FERRY_HD std::int32_t count(int tp_rank, int local, int source) const {
    const std::int64_t from = std::int64_t{source} * shape.tp + tp_rank,
                       expert = std::int64_t{shape.first_expert + local} * shape.tp + tp_rank;
    return plan.counts[from * shape.experts * shape.tp + expert];
  }
  FERRY_HD std::int64_t rows_of_expert(int local) const {
    std::int64_t rows = 0;
    for (int i = 0; i < shape.tp; ++i) rows += tables.pair_rows[i * shape.local_experts + local];
    return rows;
  }
  FERRY_HD std::int64_t aligned(std::int64_t rows) const {
    return (rows + shape.alignment - 1) / shape.alignment * shape.alignment;
  }
  // Places the segments of a pair among the gathered rows.
  FERRY_HD void place_pair(int pair) const {
    std::int32_t first = tables.pair_first[pair];
    for (int source = 0; source < shape.sub_groups(); ++source) {
      tables.gathered_row[pair * shape.sub_groups() + source] = first;
      first += count(pair / shape.local_experts, pair % shape.local_experts, source);
    }
  }
  // Places the segments of an expert among its rows, which are in the order of their senders.
  FERRY_HD void place_expert(int local) const {
    std::int32_t first = tables.group_first[local];
    for (int from = 0; from < shape.ranks; ++from) {
      const int source = from / shape.tp, i = from % shape.tp;
      tables.row[(i * shape.local_experts + local) * shape.sub_groups() + source] = first;
      first += count(i, local, source);
    }
  }
};

// Packs the rows that this rank has received, each followed by its source and weight.
struct PackRows {
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
struct UnpackRows {
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
struct TakeCombine {
  SliceShape shape;
  const SliceTerms* terms;    // [R]
  const float* topk_weights;  // [N, K] or null
  float* slice_weights;
  std::int32_t slots;  // rows of the result for a token
  // For wire_counts().
  SegmentTables tables;
  std::int64_t output_bytes, result_bytes;  // of a row
  SliceTotals* all_calls;
  SliceState* state;
};

// Copies the experts' outputs in gathered order, as they are or as fp32, and this rank's row weights.
struct PackOutputs {
  SliceShape shape;
  const SliceState* state;
  SegmentTables tables;
  const std::byte* outputs;
  std::int64_t output_stride;
  DType output_type, type;  // as passed, and as packed
  std::int64_t row_bytes;   // as packed
  std::byte* to;
  const float* row_weights;  // or null
  float* own_weights;
};

// Copies the results of all N tokens to where the caller wants them.
struct CopyResults {
  const SliceState* state;
  std::int32_t slots;  // rows of a token
  const std::byte* from;
  std::byte* to;
  std::int64_t stride, row_bytes;
};

// How large a step that moves rows may be.
struct StepSize {
  std::int64_t rows;  // at most
  int sm_limit;       // 0: none
};

// The steps of one lane.
class SliceSteps {
 public:
  virtual ~SliceSteps() = default;

  virtual void post_dispatch(const PostDispatch& call, Stream stream) = 0;
  virtual void take_slice(const TakeSlice& call, Stream stream) = 0;
  virtual void take_combine(const TakeCombine& call, Stream stream) = 0;
  virtual void find_segments(const FindSegments& call, Stream stream) = 0;
  virtual void copy_tokens(const CopyTokens& call, const StepSize& size, Stream stream) = 0;
  virtual void pack_rows(const PackRows& call, const StepSize& size, Stream stream) = 0;
  virtual void unpack_rows(const UnpackRows& call, const StepSize& size, Stream stream) = 0;
  virtual void pack_outputs(const PackOutputs& call, const StepSize& size, Stream stream) = 0;
  virtual void copy_results(const CopyResults& call, const StepSize& size, Stream stream) = 0;
};

}  // namespace ferry::sliced
