// Generates a run's report from random numbers.
#pragma once

#include <cstdint>

#include "tools/report/run_report.hpp"

namespace ferry::report {

struct RunShape {
  int ranks = 8;
  int experts = 256;
  int steps = 200;
};

// Times are whole nanoseconds, so that JSON keeps them exactly.
RunReport synthetic_run(std::uint64_t seed, const RunShape& shape = {});

}  // namespace ferry::report
