// The call summary that a rank sends to its peers besides the rows: which optional arguments it was given,
// and how it sends.
#pragma once

#include <cstdint>

#include "exchange/configuration.hpp"
#include "group/agreement.hpp"

namespace ferry::cpu {

// Whether this rank was given an optional argument. `irrelevant`: the rank has no tokens or rows that the
// argument would describe, so either is right there.
enum class Given : std::int32_t { no = 0, yes = 1, irrelevant = 2 };

inline Given given(const void* argument, bool relevant) {
  return !relevant ? Given::irrelevant : argument != nullptr ? Given::yes : Given::no;
}

// The head of a call's summary. A dispatch that makes a plan appends its routes to every expert [E] and its
// messages to every rank [R], both int32.
struct SummaryHead {
  Given arguments[3];     // combine: rows, values, row_weights
  std::int32_t split;     // 1: send phase and receive phase are separate calls
  std::int32_t max_rows;  // most rows this rank's chunks cover; see ChunkSchedule::add_rank
  std::int32_t rows_end;  // combine: every row that this rank sends is below it; -1: it sends all
  std::int32_t tokens;    // N
};
static_assert(sizeof(SummaryHead) == 4 * kCallSummaryWords);

// Checks that an optional argument is given on all ranks or on none. Pointers alone cannot be compared,
// because a rank without rows may pass either; so every rank sends a Given, and all ranks check the same
// ones.
class OptionalArgument {
 public:
  void add_rank(int rank, Given given) {
    if (given == Given::yes && first_with_ < 0) first_with_ = rank;
    if (given == Given::no && first_without_ < 0) first_without_ = rank;
  }
  bool given_anywhere() const { return first_with_ >= 0; }

  // Call after add_rank() of every rank. Throws UsageError if some ranks gave the argument and others did
  // not.
  void require_same(const char* operation, const char* argument) const {
    if (first_with_ < 0 || first_without_ < 0) return;
    throw_given_on_some(operation, argument, first_with_, first_without_);
  }

 private:
  int first_with_ = -1;
  int first_without_ = -1;
};

}  // namespace ferry::cpu
