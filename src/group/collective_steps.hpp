// Construction steps that either succeed on all ranks or throw on all of them.
#pragma once

#include <cstdint>
#include <exception>

#include "ferry/group.hpp"

namespace ferry {

// Collective. Throws UsageError on every rank unless all of them request the same size of symmetric memory.
void require_same_size(const Rank& rank, std::int64_t bytes);

// Collective. Every rank passes its error (null: none) and throws the error of the lowest rank that has one.
void throw_first_error(const Rank& rank, const std::exception_ptr& mine);

// Collective. Runs `step` on this rank and returns if it succeeded on all ranks. Otherwise every rank throws
// the error of the lowest rank on which it failed.
template <class Step>
void run_on_all_ranks(const Rank& rank, Step step) {
  std::exception_ptr error;
  try {
    step();
  } catch (...) {
    error = std::current_exception();
  }
  throw_first_error(rank, error);
}

}  // namespace ferry
