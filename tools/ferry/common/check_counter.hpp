// How a check goes.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace ferry::app {

// An index, known not to be negative, as containers take it.
inline std::size_t at(std::int64_t index) {
  return static_cast<std::size_t>(index);
}

// Plain bytes, so that it can lie in memory that processes share.
struct Tally {
  std::int64_t compared = 0;
  std::int64_t wrong = 0;
  double error = 0;               // largest relative error, of checks that allow one
  std::array<char, 200> first{};  // where it first went wrong, in words

  void right(std::int64_t count) { compared += count; }

  void fail(std::int64_t count, const std::string& where) {
    compared += count;
    if (wrong == 0) where.copy(first.data(), first.size() - 1);
    wrong += count;
  }

  void add(const Tally& other) {
    if (wrong == 0) first = other.first;
    compared += other.compared;
    wrong += other.wrong;
    error = std::max(error, other.error);
  }
};

}  // namespace ferry::app
