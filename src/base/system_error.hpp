// Errors of the operating system, with its own words.
#pragma once

#include <string>
#include <system_error>

#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry {

// `text`: what was wanted. Call with errno read before anything else can change it.
inline SystemError system_error(const std::string& text, int error_number) {
  return SystemError(str(text, ": ", std::generic_category().message(error_number)), error_number);
}

}  // namespace ferry
