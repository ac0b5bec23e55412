// Where the rows of shared experts lie on a rank: one function for the host planner and for kernels.
//
// Every rank holds the shared experts, so their rows are a rank's own tokens and never travel. Their groups
// come before those of the routed experts, and a row's position follows from the rank's number of tokens
// alone.
#pragma once

#include <cstdint>

#include "base/host_device.hpp"
#include "plan/slot.hpp"

namespace ferry {

// Tokens [first, first + count) of a rank.
struct SharedTokens {
  std::int64_t first, count;

  // Those of `tokens` tokens that have shared rows on `rank`. `split`: Config::shared_split. Int: holds
  // split * tokens; kernels, where division is costly, take 32 bits.
  template <class Int>
  FERRY_HD static constexpr SharedTokens of(Int tokens, Int rank, Int split) {
    if (split == 0) return {0, tokens};
    const Int low = rank < split ? rank : split, high = rank < split ? rank + 1 : split,
              first = low * tokens / split;
    return {first, high * tokens / split - first};
  }
};

struct SharedRows {
  std::int64_t first;     // the rank's first token that has shared rows
  std::int64_t count;     // how many tokens from there on have them
  std::int64_t stride;    // rows from one group to the next; expert_padded: rows that a group has room for
  std::int64_t capacity;  // rows of the rank, all groups together

  // The row of a token in the group of shared expert `expert`, or -1 if it is past the capacity or the token
  // has its shared rows on another rank.
  FERRY_HD constexpr std::int64_t row(std::int64_t expert, std::int64_t token) const {
    const std::int64_t index = token - first, row = expert * stride + index;
    return index >= 0 && index < count && index < stride && row < capacity ? row : -1;
  }
};

}  // namespace ferry
