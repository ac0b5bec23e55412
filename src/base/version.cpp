#include "ferry/version.hpp"

namespace ferry {

std::string_view version() noexcept {
  return FERRY_VERSION;
}

}  // namespace ferry
