// Limits that several parts of the library have in common.
#pragma once

#include <cstdint>

namespace ferry {

inline constexpr int kMostExperts = 1 << 20;  // of an exchange, and of a recorded trace

// Every change of the ranks of a group, or of a placement, begins a new epoch. Call headers, failures and the
// threads that watch for them carry it.
inline constexpr std::uint32_t kFirstEpoch = 1;

}  // namespace ferry
