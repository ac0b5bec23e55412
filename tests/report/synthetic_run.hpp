// A run's report made of random numbers, in the shape of a real one.
#pragma once

#include <cstdint>

#include "tools/report/run_report.hpp"

namespace ferry::report {

struct RunShape {
  int ranks = 8;
  int experts = 256;
  int steps = 200;
};

// All times are whole nanoseconds.
RunReport synthetic_run(std::uint64_t seed, const RunShape& shape = {});

}  // namespace ferry::report
