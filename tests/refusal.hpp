// The message with which a call is refused; "accepted" if it is not.
#pragma once

#include <functional>
#include <string>

#include "ferry/error.hpp"

namespace ferry::test {

template <class Expected = UsageError>
std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Expected& error) {
    return error.what();
  }
  return "accepted";
}

}  // namespace ferry::test
