// Stress tests: many calls in a row under random delays, with every value checked.
#pragma once

#include <cstdint>

#include "ferry/group.hpp"

namespace ferry {

// Runs `calls` dispatches and combines on `ranks` threads, with random delays at every fault point. Fails the
// calling test if a row or a sum holds a value that its own call did not write.
void run_with_random_delays(int ranks, std::uint64_t calls);

// Collective. Runs `calls` calls and throws if resident memory, descriptors or mappings have grown. Throws on
// the rank that grew, so that it works in forked ranks as well.
void require_no_growth(Rank rank, std::uint64_t calls);

}  // namespace ferry
