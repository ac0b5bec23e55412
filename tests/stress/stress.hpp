// Many calls in a row under random delays, every value checked.
#pragma once

#include <cstdint>

#include "ferry/group.hpp"

namespace ferry {

// `calls` dispatches and combines of `ranks` threads; delays at every named point. Fails the test that calls
// it when a row or a sum holds anything but what its own call wrote.
void stress(int ranks, std::uint64_t calls);

// One rank of a group: throws when memory, descriptors or mappings have grown after `calls`
// calls. Throws in the rank that grew, so that it works in forked ranks as well.
void play_without_growth(Rank rank, std::uint64_t calls);

}  // namespace ferry
