// The persistent ranks of a test program, kept in step with GoogleTest's loop over tests.
#pragma once

#include "harness/persistent_ranks.hpp"

namespace ferry::contract {

// The program's persistent ranks, shared by all its tests; they exit after the last test. In a rank's
// process, tests that do not run on its rank are skipped, and only failures are printed.
PersistentRanks& program_ranks();

}  // namespace ferry::contract
