// Counts what a check of `ferry run` compared and what it found wrong.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace ferry::app {

// Converts an index that cannot be negative to the type that standard containers take.
inline std::size_t at(std::int64_t index) {
  return static_cast<std::size_t>(index);
}

// Trivially copyable, so that it can lie in memory that processes share. All zeros is the initial state.
struct CheckCounter {
  std::int64_t compared = 0;
  std::int64_t wrong = 0;
  double max_error = 0;                   // largest relative error, for checks with a tolerance
  std::array<char, 200> first_failure{};  // where the first wrong value was found, in words

  void pass(std::int64_t count) { compared += count; }

  void fail(std::int64_t count, const std::string& where) {
    compared += count;
    if (wrong == 0) where.copy(first_failure.data(), first_failure.size() - 1);
    wrong += count;
  }

  void add(const CheckCounter& other) {
    if (wrong == 0) first_failure = other.first_failure;
    compared += other.compared;
    wrong += other.wrong;
    max_error = std::max(max_error, other.max_error);
  }
};

}  // namespace ferry::app
