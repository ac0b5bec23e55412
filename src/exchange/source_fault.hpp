// Why a combine by source (ferry/max.hpp) cannot go on: the arrays contradict each other, or this rank's ids.
#pragma once

#include <cstdint>
#include <string>

namespace ferry {

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

}  // namespace ferry
