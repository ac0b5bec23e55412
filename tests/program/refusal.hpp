// The message with which a call is refused.
#pragma once

#include <functional>
#include <string>

#include "ferry/error.hpp"

namespace ferry::test {

inline std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

}  // namespace ferry::test
