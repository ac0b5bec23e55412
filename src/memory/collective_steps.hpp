// Steps that succeed on all ranks or fail on all of them.
#pragma once

#include <cstdint>
#include <exception>

#include "ferry/group.hpp"

namespace ferry {

// Collective. UsageError on every rank unless all of them ask for the same size of symmetric memory.
void compare_sizes(const Rank& rank, std::int64_t bytes);

// Collective. Every rank throws the error of the first rank that has one (null: this one has none).
void agree(const Rank& rank, const std::exception_ptr& mine);

// Collective. Runs `make` on this rank and returns if it succeeded on all of them; otherwise every rank
// throws the error of the first rank where it did not.
template <class Make>
void make_on_all(const Rank& rank, Make make) {
  std::exception_ptr error;
  try {
    make();
  } catch (...) {
    error = std::current_exception();
  }
  agree(rank, error);
}

}  // namespace ferry
