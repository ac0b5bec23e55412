// Faults that calls report by number, from kernels too, and their errors: of a combine by source and of
// experts in slices.
#pragma once

#include <cstdint>
#include <string>

namespace ferry {

// Why a combine by source (ferry/max.hpp) cannot go on: the arrays contradict each other, or this rank's ids.
// The numbers of each are those of SourceFaultNumbers, in brackets.
enum class SourceFault : std::int32_t {
  none,
  tokens,         // N [a] is more than max_tokens [b]
  counts,         // counts[a, b] = c, must be 0 to d
  shared_counts,  // counts[a, b] = c, must be d: `limit` tokens of this rank
  capacity,       // a rows, this rank receives at most b
  row_offsets,    // row_offsets[a] = b, counts give c
  info,           // src_info[a] = {c, d}, of `peer`, must be below {limit, b}
  shared_row,     // src_info[a] = {c, d}, must be {limit, b}
  other_expert,   // src_info[a] = {c, d} is a row of expert b, which topk_ids does not say
  twice,          // src_info[a] = {c, d}, of `peer`, is also in row b
  missing,        // topk_ids[c, d] = a, an expert of this rank, has no row
  not_returned    // topk_ids[c, d] is expert a: `peer` has returned no row for it
};

struct SourceFaultNumbers {
  int peer = -1;
  std::int64_t limit = 0, a = 0, b = 0, c = 0, d = 0;
};

// What is wrong, and the remedy. `rank`: the rank that has passed the arrays.
std::string text_of(SourceFault fault, int rank, const SourceFaultNumbers& numbers);
// @throws UsageError  always: the same, with the name of the call
[[noreturn]] void raise_source_fault(SourceFault fault, int rank, const SourceFaultNumbers& numbers);

// For DeviceError::index: the fault and the limit.
inline constexpr int kSourceFaultBits = 4;

// Why a call of experts in slices fails: its ranks pass arguments that contradict each other.
enum class SliceFault : std::int32_t {
  tokens,   // of a dispatch: N differs within a sub-group
  ids,      // the ids differ
  plan,     // of a combine: the counts of a plan are not those of its total
  outputs,  // null, for rows
  result,   // null, for tokens
  types,    // of outputs and result differ
  slice     // the plans of a sub-group are not of one dispatch
};
inline constexpr int kSliceFaultBits = 3;

// The types of outputs and result in one number.
constexpr std::int32_t slice_types(int outputs, int result) {
  return outputs << 8 | result;
}

// `rank`: the first that does not fit; `other`: the rank with which it was compared, or for `slice` the
// tokens that its plan should be for. `mine`, `theirs`: the numbers that do not fit. tokens: of `rank`, of
// `other`; outputs, result: rows, tokens of `rank`; types: as slice_types(), of `rank`, of rank 0; slice:
// tokens of the plan, of the sub-group.
// @throws UsageError  always
[[noreturn]] void raise_slice_fault(SliceFault fault, int rank, int other, std::int64_t mine,
                                    std::int64_t theirs);

}  // namespace ferry
