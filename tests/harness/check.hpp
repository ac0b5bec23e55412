// Comparisons inside a rank. They throw, so that Group::run brings a failure from any rank, thread or
// process, to the test that started it.
#pragma once

#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>

#include "base/text.hpp"

namespace ferry::contract {

class Mismatch : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) throw Mismatch(str(parts...));
}

// `what` comes in parts, as most values are compared more often than a text could be put together.
template <class Actual, class Expected, class... What>
void require_equal(const Actual& actual, const Expected& expected, const What&... what) {
  if (!(actual == expected)) throw Mismatch(str(what..., ": got ", actual, ", expected ", expected));
}

// Element by element, with the first difference in the message.
template <class T>
void require_equal_lists(const T* actual, std::span<const T> expected, const std::string& what) {
  require(actual != nullptr || expected.empty(), what, ": no memory");
  for (std::size_t i = 0; i < expected.size(); ++i) {
    require_equal(actual[i], expected[i], what, "[", i, "]");
  }
}

// Byte by byte; `unit` bytes make up an element (for the message).
void require_equal_bytes(std::span<const std::byte> actual, std::span<const std::byte> expected,
                         std::size_t unit, const std::string& what);

}  // namespace ferry::contract
