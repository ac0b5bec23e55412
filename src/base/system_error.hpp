// Makes a SystemError from errno, with the operating system's text.
#pragma once

#include <string>
#include <system_error>

#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry {

// `text`: what was attempted. Pass errno before another call can change it.
inline SystemError system_error(const std::string& text, int error_number) {
  return SystemError(str(text, ": ", std::generic_category().message(error_number)), error_number);
}

}  // namespace ferry
