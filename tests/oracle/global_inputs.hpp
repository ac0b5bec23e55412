// What the oracle looks at: the inputs of all ranks at once.
//
// The reference is independent on purpose. It includes the public headers and the standard library and
// nothing else of Ferry: it finds places by sorting and does its arithmetic in double, so that a mistake in
// the shared headers does not agree with itself.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ferry/config.hpp"
#include "ferry/format.hpp"
#include "ferry/types.hpp"

namespace ferry::oracle {

// What one rank brings to a dispatch; rows lie dense.
struct RankInputs {
  std::int64_t tokens = 0;
  std::array<std::vector<std::byte>, kMaxParts> parts;  // raw: every part; otherwise the values, in parts[0]
  std::vector<std::int64_t> ids;                        // [tokens, top_k]
  std::vector<float> weights;                           // [tokens, top_k] if GlobalInputs::weighted
};

struct GlobalInputs {
  Config config;
  Format format;
  DType type = DType::bf16;  // of the values
  bool weighted = false;
  bool apply_weights = false;
  std::vector<RankInputs> ranks;

  int size() const { return static_cast<int>(ranks.size()); }
};

}  // namespace ferry::oracle
