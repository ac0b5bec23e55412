// Rows of values while a program runs.
#pragma once

#include <cstdint>

#include "base/text.hpp"
#include "ferry/evaluator.hpp"

namespace ferry {

// Bytes of a row of tokens, ids or weights for an exchange of this configuration.
inline std::int64_t row_bytes(const ProgramValue& rows, const Config& config) {
  if (rows.kind == ValueKind::tokens) return config.hidden * bytes_of(rows.type);
  return config.top_k * (rows.kind == ValueKind::ids ? bytes_of(rows.id_type) : 4);
}

// Throws UsageError for tokens whose rows, of `row` bytes, are not contiguous.
inline void require_dense(const ProgramValue& rows, std::int64_t row) {
  if (rows.kind == ValueKind::tokens && rows.stride != 0 && rows.stride != row)
    throw UsageError(str("the rows are ", rows.stride, " bytes apart, dense rows of ", row, " are needed"));
}

}  // namespace ferry
