#include "tools/ferry/bench/times.hpp"

#include <algorithm>
#include <cstddef>

namespace ferry::app {

double percentile(std::vector<double> values, double p) {
  const auto at = static_cast<std::size_t>(p * static_cast<double>(values.size() - 1) + 0.5);
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
  return values[at];
}

BenchTimes times_of(const std::vector<double>& seconds) {
  return {.p50 = percentile(seconds, 0.5), .p99 = percentile(seconds, 0.99)};
}

std::vector<double> slowest(const std::vector<std::vector<double>>& seconds) {
  std::vector<double> most = seconds.front();
  for (const std::vector<double>& rank : seconds) {
    for (std::size_t replay = 0; replay < most.size(); ++replay)
      most[replay] = std::max(most[replay], rank[replay]);
  }
  return most;
}

}  // namespace ferry::app
