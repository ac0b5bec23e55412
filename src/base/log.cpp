#include "base/log.hpp"

#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <string_view>

#include "base/environment.hpp"

namespace ferry {

namespace {

iovec part_of(std::string_view text) {
  // writev does not change what it writes, but takes it as if it could.
  return {const_cast<char*>(text.data()), text.size()};
}

}  // namespace

bool log_enabled() noexcept {
  static const bool enabled = Environment::says_yes(&Environment::log);
  return enabled;
}

void log_line(const std::string& line) noexcept {
  if (!log_enabled()) return;
  // One call: stdio may write a line in pieces, between which other processes write theirs.
  const std::array<iovec, 3> parts = {part_of("ferry: "), part_of(line), part_of("\n")};
  [[maybe_unused]] const ssize_t written = writev(STDERR_FILENO, parts.data(), parts.size());
}

}  // namespace ferry
