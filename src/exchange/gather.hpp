// What the ranks tell each other before rows are gathered or scattered, and the checks of it.
#pragma once

#include <cstdint>
#include <span>

#include "ferry/types.hpp"

namespace ferry {

// What a rank says of its memory.
struct GatherTerms {
  std::int64_t count;  // its own rows
  std::int64_t held;   // all_gather_v: rows that `gathered` has room for; reduce_scatter_v: its `total`
};

// Every rank checks the terms of all ranks, so that all of them end with the same error.
// @throws UsageError  a rank has too little room
void check_all_gather(std::span<const GatherTerms> ranks);
// @throws UsageError  a rank's total is not the sum of the counts
void check_reduce_scatter(std::span<const GatherTerms> ranks);

std::int64_t sum_of_counts(std::span<const GatherTerms> ranks);
std::int64_t largest_count(std::span<const GatherTerms> ranks);

}  // namespace ferry
