// Log lines on stderr, if FERRY_LOG is set.
#pragma once

#include <string>

namespace ferry {

// Whether lines are wanted. The variable is read once.
bool log_enabled() noexcept;

// Writes "ferry: `line`" in one piece. For lines whose text costs time, ask log_enabled() first.
void log_line(const std::string& line) noexcept;

}  // namespace ferry
