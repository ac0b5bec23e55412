// Elementwise experts for tests that look at a whole layer: expert e multiplies by a number of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ferry/exchange.hpp"
#include "oracle/numbers.hpp"

namespace ferry::contract {

inline float factor_of(int expert) {
  return 0.5f + 0.37f * static_cast<float>(expert % 11);
}

// What expert `expert` makes of one value.
inline float expert_value(int expert, float x, DType type) {
  return oracle::rounded(type, factor_of(expert) * x);
}

// The experts' rows for arrivals of an expert layout whose values are of `type`: [total, hidden], dense.
inline std::vector<std::byte> apply_experts(const DispatchResult& rows, int hidden, DType type) {
  const std::int64_t size = bytes_of(type);
  std::vector<std::byte> outputs(*rows.total * hidden * size);
  const auto* values = static_cast<const std::byte*>(rows.data);
  for (int group = 0; group < rows.groups; ++group) {
    const std::int64_t first = std::int64_t{rows.row_offsets[group]} * hidden;
    for (std::int64_t i = first; i < first + std::int64_t{rows.counts[group]} * hidden; ++i) {
      const float x = oracle::load(type, values + i * size);
      oracle::store(type, expert_value(rows.group_expert[group], x, type), outputs.data() + i * size);
    }
  }
  return outputs;
}

}  // namespace ferry::contract
