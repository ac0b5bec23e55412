#include "base/log.hpp"

#include <cstdio>

#include "base/environment.hpp"

namespace ferry {

bool log_enabled() noexcept {
  static const bool enabled = [] {
    try {
      const std::string value = Environment::read().log;
      return !value.empty() && value != "0";
    } catch (...) {  // no memory
      return false;
    }
  }();
  return enabled;
}

void log_line(const std::string& line) noexcept {
  if (log_enabled()) std::fprintf(stderr, "ferry: %s\n", line.c_str());
}

}  // namespace ferry
