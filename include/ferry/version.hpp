// The version of the linked library.
#pragma once

#include <string_view>

namespace ferry {

/// Version of the linked library, "major.minor.patch". Static and null-terminated.
std::string_view version() noexcept;

}  // namespace ferry
