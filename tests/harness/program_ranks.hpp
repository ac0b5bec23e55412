// The tests of a program whose ranks last: processes in step with GoogleTest's loop.
#pragma once

#include "harness/persistent_ranks.hpp"

namespace ferry::contract {

// Those of this program, of which its largest groups have all. They end with its last test. In a rank's
// process tests that its ranks do not play are skipped, and nothing is written but what fails.
PersistentRanks& program_ranks();

}  // namespace ferry::contract
