// What the steps of experts in slices do with one rank's terms and one row, for the host and for kernels.
//
// `By` executes the work on a row, as a thread of the host or as a warp: copy(to, from, bytes),
// widen(type, from, to, values), zero(bytes, begin, end), store(to, tail), load(from); index() of threads(),
// and first(), whether this thread writes single values.
#pragma once

#include <cstdint>

#include "backends/sliced/steps.hpp"
#include "plan/slot.hpp"

namespace ferry::sliced {

FERRY_HD std::int64_t caller_id(const void* ids, bool wide, std::int64_t index) {
  return wide ? static_cast<const std::int64_t*>(ids)[index] : static_cast<const std::int32_t*>(ids)[index];
}

FERRY_HD SliceState slice_of(const SliceShape& shape, std::int64_t tokens) {
  const auto [first, count] = TokenSlice::of(tokens, shape.tp_rank(), shape.tp);
  SliceState slice{};
  slice.first = static_cast<std::int32_t>(first);
  slice.count = static_cast<std::int32_t>(count);
  slice.tokens = static_cast<std::int32_t>(tokens);
  return slice;
}

// The arguments of raise_slice_fault(): the first rank that differs.
struct SliceDifference {
  bool found;
  SliceFault fault;
  int rank, other;
  std::int64_t mine, theirs;
};

// Whether the ranks of each sub-group pass the same tokens and ids.
FERRY_HD SliceDifference dispatch_difference(const SliceShape& shape, const SliceTerms* terms) {
  for (int rank = 0; rank < shape.ranks; ++rank) {
    const int first = rank - rank % shape.tp;
    if (terms[rank].tokens != terms[first].tokens)
      return {true, SliceFault::tokens, rank, first, terms[rank].tokens, terms[first].tokens};
    if (terms[rank].ids_hash != terms[first].ids_hash) return {true, SliceFault::ids, rank, first, 0, 0};
  }
  return {};
}

// N of the sub-group that begins with rank `first`, by the plans of a combine.
FERRY_HD std::int64_t tokens_of_plans(const SliceShape& shape, const SliceTerms* terms, int first) {
  std::int64_t tokens = 0;
  for (int i = 0; i < shape.tp; ++i) tokens += terms[first + i].tokens;
  return tokens;
}

// Whether the ranks' plans and arguments are compatible.
FERRY_HD SliceDifference combine_difference(const SliceShape& shape, const SliceTerms* terms) {
  for (int rank = 0; rank < shape.ranks; ++rank) {
    const SliceTerms& mine = terms[rank];
    const std::int64_t tokens = tokens_of_plans(shape, terms, rank - rank % shape.tp);
    const auto expected = static_cast<std::int32_t>(TokenSlice::of(tokens, rank % shape.tp, shape.tp).count);
    if ((mine.arguments & kPlanDamaged) != 0) return {true, SliceFault::plan, rank, expected, 0, 0};
    if (mine.rows > 0 && (mine.arguments & kHasOutputs) == 0)
      return {true, SliceFault::outputs, rank, expected, mine.rows, 0};
    if (tokens > 0 && (mine.arguments & kHasResult) == 0)
      return {true, SliceFault::result, rank, expected, tokens, 0};
    if (mine.types != terms[0].types)
      return {true, SliceFault::types, rank, expected, mine.types, terms[0].types};
    if (expected != mine.tokens || tokens > shape.max_tokens)
      return {true, SliceFault::slice, rank, expected, mine.tokens, tokens};
  }
  return {};
}

// Takes slot i of the slice. The first `slice.count` * K slots.
FERRY_HD void take_slot(const TakeSlice& call, const SliceState& slice, std::int64_t i) {
  const std::int64_t from = std::int64_t{slice.first} * call.shape.top_k + i;
  const ExpertSlices slices{call.shape.experts, call.shape.tp};
  call.slice_ids[i] = slices.id_of_slice(caller_id(call.ids, call.wide_ids, from), call.shape.tp_rank());
  if (call.weights != nullptr) call.slice_weights[i] = call.weights[from];
}

// This rank's part of a combine whose terms agree.
FERRY_HD SliceState combine_slice(const TakeCombine& call) {
  const SliceShape& shape = call.shape;
  SliceState slice = slice_of(shape, tokens_of_plans(shape, call.terms, shape.rank - shape.tp_rank()));
  slice.own_rows = call.state->own_rows;
  slice.gathered = call.state->gathered;
  slice.slots = slice.count * call.slots;
  return slice;
}

FERRY_HD_CALLS_ARGUMENT
template <class By>
FERRY_HD void copy_token(By by, const CopyTokens& call, std::int64_t token) {
  for (int p = 0; p < call.parts; ++p) {
    by.copy(call.to[p] + token * call.row_bytes[p],
            call.from[p] + (call.state->first + token) * call.stride[p], call.row_bytes[p]);
  }
}

FERRY_HD_CALLS_ARGUMENT
template <class By>
FERRY_HD void pack_row(By by, const PackRows& call, std::int64_t row) {
  std::byte* to = call.to + row * call.row_bytes;
  for (int p = 0; p < call.parts; ++p) {
    by.copy(to, call.from[p] + row * call.part_bytes[p], call.part_bytes[p]);
    to += call.part_bytes[p];
  }
  if (!by.first()) return;
  SliceRowTail tail{call.sources[row], call.weight != nullptr ? call.weight[row] : 0};
  const int from = tail.source.rank, tp = call.shape.tp;
  if (from >= 0 && from < call.shape.ranks)
    tail.source.token +=
        static_cast<std::int32_t>(TokenSlice::of(call.terms[from].tokens, from % tp, tp).first);
  by.store(to, tail);
}

// The segment of a gathered row. The row must exist.
FERRY_HD int segment_of(const SegmentTables& tables, int segments, std::int64_t row) {
  int low = 0, high = segments;  // gathered_row[low] <= row < gathered_row[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (tables.gathered_row[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

FERRY_HD_CALLS_ARGUMENT
template <class By>
FERRY_HD void unpack_row(By by, const UnpackRows& call, std::int64_t gathered_row) {
  const int segment = segment_of(call.tables, call.shape.segments(), gathered_row);
  const std::int64_t row = call.tables.row[segment] + gathered_row - call.tables.gathered_row[segment];
  const std::byte* from = call.from + gathered_row * call.row_bytes;
  for (int p = 0; p < call.parts; ++p) {
    by.copy(call.to[p] + row * call.part_bytes[p], from, call.part_bytes[p]);
    from += call.part_bytes[p];
  }
  if (!by.first()) return;
  const SliceRowTail tail = by.load(from);
  call.sources[row] = tail.source;
  if (call.weight != nullptr) call.weight[row] = tail.weight;
  if (call.group_of_row != nullptr)
    call.group_of_row[row] = segment / call.shape.sub_groups() % call.shape.local_experts;
}

// Fills the padding rows of an expert.
FERRY_HD_CALLS_ARGUMENT
template <class By>
FERRY_HD void pad_group(By by, const UnpackRows& call, int group) {
  const std::int64_t begin = call.row_offsets[group] + call.counts[group], end = call.row_offsets[group + 1];
  for (std::int64_t row = begin + by.index(); row < end; row += by.threads()) {
    call.sources[row] = Source{};
    if (call.weight != nullptr) call.weight[row] = 0;
    if (call.group_of_row != nullptr) call.group_of_row[row] = -1;
  }
  if (!call.shape.zero_padding) return;
  for (int p = 0; p < call.parts; ++p)
    by.zero(call.to[p], begin * call.part_bytes[p], end * call.part_bytes[p]);
}

FERRY_HD_CALLS_ARGUMENT
template <class By>
FERRY_HD void pack_output(By by, const PackOutputs& call, std::int64_t gathered_row) {
  const int segment = segment_of(call.tables, call.shape.segments(), gathered_row);
  const std::int64_t row = call.tables.row[segment] + gathered_row - call.tables.gathered_row[segment];
  const std::byte* const from = call.outputs + row * call.output_stride;
  std::byte* const to = call.to + gathered_row * call.row_bytes;
  if (call.type == call.output_type) {
    by.copy(to, from, call.row_bytes);
  } else {
    by.widen(call.output_type, from, to, call.shape.hidden);
  }
  const int own_pair = call.shape.tp_rank() * call.shape.local_experts;
  const std::int64_t own_row = gathered_row - call.tables.pair_first[own_pair];
  if (call.row_weights != nullptr && by.first() && own_row >= 0 && own_row < call.state->own_rows)
    call.own_weights[own_row] = call.row_weights[row];
}

}  // namespace ferry::sliced
