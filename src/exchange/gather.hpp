// The terms that ranks exchange before rows are gathered or scattered, and their checks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "ferry/error.hpp"
#include "ferry/types.hpp"

namespace ferry {

// A rank's terms.
struct GatherTerms {
  std::int64_t count;  // its own rows
  std::int64_t held;   // all_gather_v: rows that `gathered` has room for; reduce_scatter_v: its `total`
  // The row of `gathered` at which its own rows lie, or of `rows` at which its sums do; -1: they are apart.
  std::int64_t place;
};

// The ranks that gather from each other: [first, first + count).
struct SubGroup {
  std::size_t first, count;

  // The sub-group of `rank`. `size`: ranks of a sub-group; 0: all.
  static SubGroup of(int rank, int size, int ranks) {
    if (size == 0) return {0, static_cast<std::size_t>(ranks)};
    return {static_cast<std::size_t>(rank / size * size), static_cast<std::size_t>(size)};
  }
  bool holds(int rank) const {
    return static_cast<std::size_t>(rank) >= first && static_cast<std::size_t>(rank) < first + count;
  }
  std::span<const GatherTerms> terms(std::span<const GatherTerms> all) const {
    return all.subspan(first, count);
  }
};

// `rank` holds `held` rows (GatherTerms) where the counts add up to `sum`.
// @throws UsageError  always
[[noreturn]] void raise_rows_held(Operation operation, int rank, std::int64_t held, std::int64_t sum);

// The `rows` of all_gather_v or the `sums` of reduce_scatter_v lie at row `place` (GatherTerms) of the other
// array on this rank, and not at row `own`, which is theirs.
// @throws UsageError  always
[[noreturn]] void raise_misplaced(Operation operation, int rank, std::int64_t place, std::int64_t own);

// Every rank checks the terms of all ranks, so that all of them end with the same error.
// @throws UsageError  a rank has too little room, or its rows lie at the place of another's
void check_all_gather(std::span<const GatherTerms> ranks, int sub_group);
// @throws UsageError  a rank's total is not the sum of the counts, or its sums lie at another place than its
// own
void check_reduce_scatter(std::span<const GatherTerms> ranks, int sub_group);

// Call with each number that `rank` has told of itself. The rank has checked it, so one out of range means
// that the memory which the ranks share is damaged.
// @throws SystemError  `value` is below 0 or above `most`
void check_told(Operation operation, const char* name, std::int64_t value, std::int64_t most, int rank);

std::int64_t sum_of_counts(std::span<const GatherTerms> ranks);
std::int64_t largest_count(std::span<const GatherTerms> ranks);

// The bytes of a block that belong to the round from `begin` on, of rounds of `round_bytes`.
inline std::int64_t bytes_in_round(std::int64_t block_bytes, std::int64_t begin, std::int64_t round_bytes) {
  return std::clamp<std::int64_t>(block_bytes - begin, 0, round_bytes);
}

}  // namespace ferry
