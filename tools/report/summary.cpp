#include "tools/report/summary.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace ferry::report {
namespace {

constexpr std::size_t kSamplesOfP99 = 100;

double sum_of(std::span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

// The slowest rank's time in every step.
std::vector<double> stage_lengths(const RunReport& run, StepStage stage) {
  std::vector<double> lengths(static_cast<std::size_t>(run.workload.steps), 0.0);
  for (int step = 0; step < run.workload.steps; ++step) {
    double& longest = lengths[static_cast<std::size_t>(step)];
    for (int rank = 0; rank < run.configuration.ranks; ++rank) {
      longest = std::max(longest, run.at(step, rank)[stage].length_us());
    }
  }
  return lengths;
}

std::vector<double> step_lengths(const RunReport& run) {
  std::vector<double> lengths;
  for (int step = 0; step < run.workload.steps; ++step) {
    double begin = run.at(step, 0)[StepStage::dispatch].begin_us;
    double end = run.at(step, 0)[StepStage::combine].end_us;
    for (int rank = 1; rank < run.configuration.ranks; ++rank) {
      begin = std::min(begin, run.at(step, rank)[StepStage::dispatch].begin_us);
      end = std::max(end, run.at(step, rank)[StepStage::combine].end_us);
    }
    lengths.push_back(end - begin);
  }
  return lengths;
}

Latency latency_of(std::vector<double> lengths) {
  std::sort(lengths.begin(), lengths.end());
  Latency latency{.mean_us = sum_of(lengths) / static_cast<double>(lengths.size()),
                  .p50_us = percentile(lengths, 50),
                  .p90_us = percentile(lengths, 90),
                  .max_us = lengths.back()};
  if (lengths.size() >= kSamplesOfP99) latency.p99_us = percentile(lengths, 99);
  return latency;
}

StepShares shares_of(const RunReport& run, double mean_step_us) {
  const auto mean = [&](StepStage stage) {
    double sum = 0;
    for (const StepTimes& times : run.times) sum += times[stage].length_us();
    return sum / static_cast<double>(run.times.size());
  };
  StepShares shares{.dispatch_us = mean(StepStage::dispatch),
                    .experts_us = mean(StepStage::experts),
                    .combine_us = mean(StepStage::combine),
                    .step_us = mean_step_us};
  const double busy = shares.dispatch_us + shares.experts_us + shares.combine_us;
  shares.waiting_us = std::max(0.0, shares.step_us - busy);  // below zero by rounding only
  return shares;
}

double per_second(double amount, double us) {
  return us > 0 ? amount * 1e6 / us : 0.0;
}

void add_node_traffic(const Traffic& traffic, const Configuration& configuration, Flow& flow) {
  const auto ranks = static_cast<std::size_t>(configuration.ranks),
             nodes = static_cast<std::size_t>(configuration.nodes);
  if (nodes == 1) return;
  flow.node_traffic_bytes.resize(nodes * nodes);
  for (std::size_t i = 0; i < ranks * ranks; ++i) {
    const auto from = static_cast<std::size_t>(configuration.node_of_rank[i / ranks]),
               to = static_cast<std::size_t>(configuration.node_of_rank[i % ranks]);
    flow.node_traffic_bytes[from * nodes + to] += traffic.traffic_bytes[i];
    if (from != to) flow.between_nodes_bytes += traffic.traffic_bytes[i];
  }
}

Flow flow_of(const Traffic& traffic, const Configuration& configuration, double us, double limit) {
  const auto n = static_cast<std::size_t>(configuration.ranks);
  Flow flow{.sent_bytes = std::vector<std::int64_t>(n, 0), .received_bytes = std::vector<std::int64_t>(n, 0)};
  for (std::size_t from = 0; from < n; ++from) {
    for (std::size_t to = 0; to < n; ++to) {
      const std::int64_t bytes = traffic.traffic_bytes[from * n + to];
      if (from == to) {
        flow.local_bytes += bytes;
      } else {
        flow.sent_bytes[from] += bytes;
        flow.received_bytes[to] += bytes;
      }
    }
  }
  add_node_traffic(traffic, configuration, flow);
  flow.bytes_per_second = per_second(static_cast<double>(traffic.moved_bytes), us);
  if (limit > 0) flow.share_of_memcpy = flow.bytes_per_second / limit;
  return flow;
}

Busiest busiest_of(const std::vector<std::int64_t>& loads) {
  const auto largest = std::max_element(loads.begin(), loads.end());
  const auto total = std::accumulate(loads.begin(), loads.end(), std::int64_t{0});
  const double mean = static_cast<double>(total) / static_cast<double>(loads.size());
  return {.index = static_cast<int>(largest - loads.begin()),
          .mean = mean,
          .over_mean = total > 0 ? static_cast<double>(*largest) / mean : 0.0};
}

}  // namespace

double percentile(std::span<const double> ascending, double p) {
  if (ascending.empty()) return 0.0;
  const double index = std::floor(p / 100.0 * static_cast<double>(ascending.size() - 1) + 0.5);
  return ascending[static_cast<std::size_t>(index)];
}

Summary summarise(const RunReport& run) {
  validate(run);
  Summary summary;
  for (const StepStage stage : kStages) {
    summary.stages[static_cast<std::size_t>(stage)] = latency_of(stage_lengths(run, stage));
  }
  const std::vector<double> steps = step_lengths(run);
  summary.step = latency_of(steps);
  summary.shares = shares_of(run, summary.step.mean_us);

  const double tokens =
      static_cast<double>(run.workload.tokens_per_rank) * run.configuration.ranks * run.workload.steps;
  summary.tokens_per_second = per_second(tokens, sum_of(steps));

  const double limit = run.machine.memcpy_bytes_per_second;
  summary.dispatch =
      flow_of(run.dispatch, run.configuration, sum_of(stage_lengths(run, StepStage::dispatch)), limit);
  summary.combine =
      flow_of(run.combine, run.configuration, sum_of(stage_lengths(run, StepStage::combine)), limit);

  summary.expert = busiest_of(run.load.routes_per_expert);
  summary.rank = busiest_of(run.load.rows_per_rank);
  summary.idle_experts =
      static_cast<int>(std::count(run.load.routes_per_expert.begin(), run.load.routes_per_expert.end(), 0));
  summary.checks_passed = static_cast<int>(
      std::count_if(run.checks.begin(), run.checks.end(), [](const Check& check) { return check.passed; }));
  return summary;
}

}  // namespace ferry::report
