// Helpers that tests of the C interface on GPUs share.
#pragma once

#include "ferry/ferry.h"
#include "harness/check.hpp"

namespace ferry::contract {

inline void require_ok(ferry_status status, const char* what) {
  require(status == FERRY_OK, what, ": ", ferry_last_error());
}

// A struct with its size set and zeros otherwise.
template <class T>
T sized() {
  T value{};
  value.size = sizeof value;
  return value;
}

}  // namespace ferry::contract
