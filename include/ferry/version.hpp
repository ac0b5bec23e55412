#pragma once

#include <string_view>

namespace ferry {

// The version of the library that is linked, "major.minor.patch".
std::string_view version() noexcept;

}  // namespace ferry
