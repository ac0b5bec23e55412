// The points of a sweep of `ferry bench` on GPUs.
#pragma once

#include <vector>

#include "tools/ferry/bench/device_work.hpp"
#include "tools/ferry/bench/options.hpp"

namespace ferry::app {

// Every combination asked for; points that differ only in what is timed are one case. Combinations that no
// call has (sums other than partial from rank_major) are left out, and what does not depend on the format or
// the layout is timed once. Throws UsageError if nothing is left, and what construction of an exchange would
// throw.
std::vector<GpuCase> gpu_cases(const BenchOptions& options, const std::vector<Trace>& traces);

}  // namespace ferry::app
