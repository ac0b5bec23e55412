// The points of a sweep of `ferry bench`.
#pragma once

#include <string>
#include <vector>

#include "tools/ferry/bench/options.hpp"
#include "tools/ferry/bench/point.hpp"

namespace ferry::app {

// Throws what construction of an exchange would throw.
BenchPoint make_point(const BenchOptions& options, const Trace& trace, int ranks, int tokens,
                      const std::string& format, const std::string& layout, Reduction reduction);

// Every combination asked for, traces side by side. Throws UsageError for options that are for GPUs alone,
// and SystemError for a point that does not fit into memory, before anything is measured.
std::vector<BenchPoint> bench_points(const BenchOptions& options, const std::vector<Trace>& traces);

}  // namespace ferry::app
