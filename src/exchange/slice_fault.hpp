// Why a call of experts in slices fails: its ranks pass arguments that contradict each other.
#pragma once

#include <cstdint>

namespace ferry {

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
