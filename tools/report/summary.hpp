// Figures derived from a run's report: percentiles, bandwidths, and load imbalance.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tools/report/run_report.hpp"

namespace ferry::report {

// Percentile p of n ascending values: the value at index round(p / 100 * (n - 1)), with .5 rounded up. 0 if
// there are none.
double percentile(std::span<const double> ascending, double p);

// Statistics over the steps.
struct Latency {
  double mean_us = 0.0;
  double p50_us = 0.0;
  double p90_us = 0.0;
  std::optional<double> p99_us{};  // of a hundred steps or more
  double max_us = 0.0;
};

// A rank's time in a step by activity, mean over ranks and steps. The first four add up to the fifth.
struct StepShares {
  double dispatch_us = 0.0;
  double experts_us = 0.0;
  double combine_us = 0.0;
  double waiting_us = 0.0;  // outside of the stages: from the step's begin, between them, and to its end
  double step_us = 0.0;
};

// One direction, over all steps.
struct Flow {
  std::vector<std::int64_t> sent_bytes{};      // [ranks] to other ranks
  std::vector<std::int64_t> received_bytes{};  // [ranks] from other ranks
  std::int64_t local_bytes = 0;                // that stay on their rank
  // [nodes][nodes], indexed by sender, then receiver. The diagonal holds the bytes that stay in their node.
  // Empty for one node.
  std::vector<std::int64_t> node_traffic_bytes{};
  std::int64_t between_nodes_bytes = 0;     // sum outside the diagonal
  double bytes_per_second = 0.0;            // moved bytes over the sum of the slowest ranks' times
  std::optional<double> share_of_memcpy{};  // bandwidth over memcpy's rate, if measured
};

// The largest of several loads, relative to their mean.
struct Busiest {
  int index = 0;
  double mean = 0.0;
  double over_mean = 0.0;  // largest over mean; 0 if all loads are 0
};

struct Summary {
  std::array<Latency, kStages.size()> stages{};  // of each step's slowest rank
  Latency step{};                                // from the first rank's dispatch to the last rank's combine
  StepShares shares{};
  double tokens_per_second = 0.0;  // of all ranks and steps, over the sum of the steps' times
  Flow dispatch{};
  Flow combine{};
  Busiest expert{};
  Busiest rank{};
  int idle_experts = 0;  // experts without a route
  int checks_passed = 0;

  const Latency& operator[](StepStage stage) const { return stages[static_cast<std::size_t>(stage)]; }
};

Summary summarise(const RunReport& run);

}  // namespace ferry::report
