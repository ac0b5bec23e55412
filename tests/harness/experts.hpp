// Experts for tests of a whole layer: expert e multiplies every value by expert_factor(e).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ferry/exchange.hpp"
#include "oracle/numbers.hpp"

namespace ferry::contract {

inline float expert_factor(int expert) {
  return 0.5f + 0.37f * static_cast<float>(expert % 11);
}

// The output of `expert` for one input value.
inline float expert_value(int expert, float x, DType type) {
  return oracle::rounded(type, expert_factor(expert) * x);
}

// The experts' outputs for received rows, in an expert layout, whose values are of `type`: [total, hidden],
// dense.
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
