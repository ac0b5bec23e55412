// Random tokens, ids and weights of one rank, in a form that both interfaces accept.
#pragma once

#include <cstdint>
#include <vector>

#include "ferry/ferry.h"
#include "harness/random.hpp"

namespace ferry::capi_test {

inline constexpr int kMostRows = 256;  // no rank receives more in these tests

struct Inputs {
  Inputs(const ferry_config& config, contract::Random& random, int fewest = 0)
      : count(random.between(fewest, config.max_tokens)),
        values(words(count * 2 * config.hidden, random)),
        outputs(words(kMostRows * config.hidden, random)) {
    for (int i = 0; i < count * config.top_k; ++i) {
      ids.push_back(random.between(-1, config.experts - 1));
      weights.push_back(static_cast<float>(random.uniform()));
    }
    // Masks repeated experts: the default capacity does not allow for them.
    for (int i = 0; i < count * config.top_k; ++i) {
      for (int j = i - i % config.top_k; j < i; ++j) {
        if (ids[i] == ids[j]) ids[i] = -1;
      }
    }
    // Makes data() non-null on a rank without tokens, because null means that the call has no weights.
    ids.reserve(1);
    weights.reserve(1);
  }

  // 16-bit words that are finite numbers as bf16, and in pairs as fp32.
  static std::vector<std::uint16_t> words(std::int64_t count, contract::Random& random) {
    std::vector<std::uint16_t> words;
    for (std::int64_t i = 0; i < count; ++i) {
      words.push_back(static_cast<std::uint16_t>(0x3E00 | (random.next() & 0x81FF)));
    }
    return words;
  }

  int count;
  std::vector<std::uint16_t> values;   // [count, hidden], as bf16, fp16 or fp32
  std::vector<std::uint16_t> outputs;  // bf16, [kMostRows, hidden]
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

}  // namespace ferry::capi_test
