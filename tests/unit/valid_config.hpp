#pragma once

#include "ferry/config.hpp"

namespace ferry {

constexpr int kRanks = 4;

// A configuration without mistakes.
inline Config valid_config() {
  return {.experts = 10, .top_k = 4, .hidden = 64, .max_tokens = 16};
}

}  // namespace ferry
