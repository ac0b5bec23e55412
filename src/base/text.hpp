// Composes messages from values of any printable types.
#pragma once

#include <sstream>
#include <string>

namespace ferry {

// The parts, printed one after another: str("rank ", 3) is "rank 3".
template <class... Parts>
std::string str(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace ferry
