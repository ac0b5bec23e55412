// Messages put together from parts.
#pragma once

#include <sstream>
#include <string>

namespace ferry {

template <class... Parts>
std::string str(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace ferry
