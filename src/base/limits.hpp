// Limits that several parts of the library have in common.
#pragma once

namespace ferry {

inline constexpr int kMostExperts = 1 << 20;  // of an exchange, and of a recorded trace

}  // namespace ferry
