// The inputs of all ranks to a dispatch: all that the oracle computes from.
//
// The oracle is a second, independent implementation of docs/contract.md. Every backend is compared with it,
// bit for bit. It is independent on purpose: it includes Ferry's public headers and the standard library, and
// nothing of src/. It finds row positions by sorting and computes in double, so a mistake in code that the
// backends share cannot hide in the oracle as well.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ferry/config.hpp"
#include "ferry/format.hpp"
#include "ferry/types.hpp"

namespace ferry::oracle {

// One rank's arguments of a dispatch. Rows are dense.
struct RankInputs {
  std::int64_t tokens = 0;
  std::array<std::vector<std::byte>, kMaxParts> parts;  // raw: all parts; otherwise parts[0] holds the values
  std::vector<std::int64_t> ids;                        // [tokens, top_k]
  std::vector<float> weights;                           // [tokens, top_k] if GlobalInputs::weighted
};

struct GlobalInputs {
  Config config;
  Format format;
  DType type = DType::bf16;  // of the values; unused for raw parts
  bool weighted = false;     // the ranks pass weights
  bool apply_weights = false;
  float global_scale = 1;           // of nvfp4
  std::vector<float> input_scales;  // [E + S]: rows are encoded with the scale of their expert; or empty
  std::vector<RankInputs> ranks;

  int size() const { return static_cast<int>(ranks.size()); }
};

}  // namespace ferry::oracle
