// Flags: words that one rank or block sets and another polls.
#pragma once

#include <cstdint>

namespace ferry {

// All accesses to a flag, by kernels and by the host, are 8 bytes wide, because memory models order only
// accesses of the same width. The type ensures it: functions for flags take nothing else, and words of an
// LLPacket are not flags.
struct Flag {
  std::uint64_t value;  // a call number, or 0 and 1
};
static_assert(sizeof(Flag) == 8 && alignof(Flag) == 8);

}  // namespace ferry
