// Checks for code that runs as a rank. They throw instead of recording a GoogleTest failure, because a rank
// may be a process: Group::run carries the exception to the test that started the ranks.
#pragma once

#include <cstddef>
#include <functional>
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

// `what` is passed in parts and joined only on failure: most checks run too often to build a string each
// time.
template <class Actual, class Expected, class... What>
void require_equal(const Actual& actual, const Expected& expected, const What&... what) {
  if (!(actual == expected)) throw Mismatch(str(what..., ": got ", actual, ", expected ", expected));
}

// Compares element by element; the message names the first difference.
template <class T>
void require_equal_lists(const T* actual, std::span<const T> expected, const std::string& what) {
  require(actual != nullptr || expected.empty(), what, ": null pointer");
  for (std::size_t i = 0; i < expected.size(); ++i) {
    require_equal(actual[i], expected[i], what, "[", i, "]");
  }
}

// The message of the UsageError that `call` throws; empty if it throws none.
std::string usage_error(const std::function<void()>& call);
// Requires that `call` throws an Error, or a UsageError, whose message contains `words`.
void require_error(const std::string& words, const std::function<void()>& call);
void require_refused(const std::string& words, const std::function<void()>& call);

// The message counts in elements of `element_bytes`.
void require_equal_bytes(std::span<const std::byte> actual, std::span<const std::byte> expected,
                         std::size_t element_bytes, const std::string& what);

}  // namespace ferry::contract
