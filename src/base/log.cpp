#include "base/log.hpp"

#include <cstdio>

#include "base/environment.hpp"

namespace ferry {

bool log_enabled() noexcept {
  static const bool enabled = Environment::says_yes(&Environment::log);
  return enabled;
}

void log_line(const std::string& line) noexcept {
  if (log_enabled()) std::fprintf(stderr, "ferry: %s\n", line.c_str());
}

}  // namespace ferry
