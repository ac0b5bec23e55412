#include "base/log.hpp"

#include <unistd.h>

#include "base/environment.hpp"

namespace ferry {

bool log_enabled() noexcept {
  static const bool enabled = Environment::says_yes(&Environment::log);
  return enabled;
}

void log_line(const std::string& line) noexcept {
  if (!log_enabled()) return;
  try {
    // stdio may write a line in pieces, between which other processes write theirs.
    const std::string text = "ferry: " + line + "\n";
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
  } catch (...) {  // no memory for the line
  }
}

}  // namespace ferry
