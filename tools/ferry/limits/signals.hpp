// How fast ranks of this machine signal one another.
#pragma once

#include "ferry/group.hpp"

namespace ferry::app {

enum class Waiting { spinning, sleeping };

// Seconds for a flag to go one way between two ranks: half of a round trip, median over batches. Spinning
// looks at the flag and gives the core away after a while; sleeping uses the futex that Ferry's own waits end
// in. The group has two ranks.
double measure_flag(Group& group, Waiting waiting);

// Seconds for a barrier of the group, median over batches.
double measure_barrier(Group& group);

}  // namespace ferry::app
