// What follows from a run's report: percentiles, bandwidths, and how uneven the load was.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tools/report/run_report.hpp"

namespace ferry::report {

// Percentile p of n ascending values: the one at index round(p/100 * (n-1)), halves rounded up. 0 for no
// values.
double percentile(std::span<const double> ascending, double p);

// Over the steps, of what each step took.
struct Latency {
  double mean_us = 0.0;
  double p50_us = 0.0;
  double p90_us = 0.0;
  double p99_us = 0.0;
  double max_us = 0.0;
};

// One direction, over all steps.
struct Flow {
  std::vector<std::int64_t> sent_bytes{};      // [ranks] to other ranks
  std::vector<std::int64_t> received_bytes{};  // [ranks] from other ranks
  std::int64_t local_bytes = 0;                // kept by their rank
  double bytes_per_second = 0.0;               // moved bytes / sum over steps of the slowest rank's time
  std::optional<double> share_of_memcpy{};     // of the measured limit, if there is one
};

// The largest of some loads against their mean.
struct Busiest {
  int index = 0;
  double mean = 0.0;
  double over_mean = 0.0;  // largest / mean; 0 without load
};

struct Summary {
  std::array<Latency, kPhases.size()> phases{};  // of the slowest rank of each step
  Latency step{};                                // first dispatch's begin to last combine's end
  double tokens_per_second = 0.0;                // tokens of all ranks and steps / sum of the steps' times
  Flow dispatch{};
  Flow combine{};
  Busiest expert{};
  Busiest rank{};
  int idle_experts = 0;  // without a route
  int checks_passed = 0;

  const Latency& operator[](Phase phase) const { return phases[static_cast<std::size_t>(phase)]; }
};

Summary summarise(const RunReport& run);

}  // namespace ferry::report
