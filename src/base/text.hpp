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

// A number of things, `one` the word for one: "1 rank", "3 ranks".
template <class Number>
std::string counted(const Number& number, const char* one) {
  return str(number, " ", one, number == 1 ? "" : "s");
}

}  // namespace ferry
