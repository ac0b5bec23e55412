// From many measurements to the figures that are reported.
#pragma once

#include <vector>

namespace ferry::app {

// Seconds of a call.
struct BenchTimes {
  double p50 = 0, p99 = 0;
};

// The value at index round(p * (n - 1)) of the sorted ones, in_phases rounded up. There must be one.
double percentile(std::vector<double> values, double p);

BenchTimes times_of(const std::vector<double>& seconds);

// By replay, the seconds of the rank that took longest. `seconds`: by rank, by replay.
std::vector<double> slowest(const std::vector<std::vector<double>>& seconds);

}  // namespace ferry::app
