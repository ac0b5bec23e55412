#include "tools/report/run_report.hpp"

#include <cmath>
#include <cstddef>
#include <limits>
#include <string>

#include "ferry/error.hpp"

namespace ferry::report {
namespace {

void require_positive(const char* name, std::int64_t value) {
  if (value < 1)
    throw UsageError("run report: " + std::string(name) + " is " + std::to_string(value) + ", not positive");
}

void require_size(const char* name, std::size_t size, std::size_t expected) {
  if (size == expected) return;
  throw UsageError("run report: " + std::string(name) + " has " + std::to_string(size) +
                   " entries, expected " + std::to_string(expected));
}

// Their sum fits in 63 bits.
void require_counts(const char* name, const std::vector<std::int64_t>& values) {
  std::int64_t left = std::numeric_limits<std::int64_t>::max();
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] < 0 || values[i] > left)
      throw UsageError("run report: " + std::string(name) + "[" + std::to_string(i) + "] is " +
                       std::to_string(values[i]) + (values[i] < 0 ? "" : ", too large for a sum"));
    left -= values[i];
  }
}

void require_placement(const std::vector<int>& rank_of_expert, int ranks) {
  for (std::size_t expert = 0; expert < rank_of_expert.size(); ++expert) {
    const int rank = rank_of_expert[expert];
    if (rank >= 0 && rank < ranks) continue;
    throw UsageError("run report: expert " + std::to_string(expert) + " is on rank " + std::to_string(rank) +
                     " of " + std::to_string(ranks));
  }
}

void require_nodes(const Configuration& configuration) {
  for (std::size_t rank = 0; rank < configuration.node_of_rank.size(); ++rank) {
    const int node = configuration.node_of_rank[rank];
    if (node >= 0 && node < configuration.nodes) continue;
    throw UsageError("run report: rank " + std::to_string(rank) + " is on node " + std::to_string(node) +
                     " of " + std::to_string(configuration.nodes));
  }
}

// False for NaN too, and for times from which figures would overflow.
bool is_forward(const Span& span) {
  constexpr double kMostMicroseconds = 1e15;
  return std::abs(span.begin_us) <= kMostMicroseconds && std::abs(span.end_us) <= kMostMicroseconds &&
         span.begin_us <= span.end_us;
}

void require_times(const RunReport& run) {
  const auto ranks = static_cast<std::size_t>(run.configuration.ranks);
  for (std::size_t i = 0; i < run.times.size(); ++i) {
    for (const StepStage stage : kStages) {
      const Span& span = run.times[i][stage];
      if (is_forward(span)) continue;
      throw UsageError("run report: step " + std::to_string(i / ranks) + ", rank " +
                       std::to_string(i % ranks) + ": " + to_string(stage) + " begins at " +
                       std::to_string(span.begin_us) + " us and ends at " + std::to_string(span.end_us) +
                       " us");
    }
  }
}

}  // namespace

const char* to_string(StepStage stage) {
  switch (stage) {
    case StepStage::dispatch:
      return "dispatch";
    case StepStage::experts:
      return "experts";
    case StepStage::combine:
      return "combine";
  }
  return "unknown";
}

void validate(const RunReport& run) {
  require_positive("ranks", run.configuration.ranks);
  require_positive("experts", run.configuration.experts);
  require_positive("top_k", run.configuration.top_k);
  require_positive("steps", run.workload.steps);
  require_positive("nodes", run.configuration.nodes);
  if (run.configuration.nodes > run.configuration.ranks)
    throw UsageError("run report: nodes is " + std::to_string(run.configuration.nodes) +
                     ", more than ranks, " + std::to_string(run.configuration.ranks));
  const auto ranks = static_cast<std::size_t>(run.configuration.ranks);
  const auto experts = static_cast<std::size_t>(run.configuration.experts);

  require_size("times", run.times.size(), static_cast<std::size_t>(run.workload.steps) * ranks);
  require_size("dispatch traffic_bytes", run.dispatch.traffic_bytes.size(), ranks * ranks);
  require_size("combine traffic_bytes", run.combine.traffic_bytes.size(), ranks * ranks);
  require_size("routes_per_expert", run.load.routes_per_expert.size(), experts);
  require_size("rank_of_expert", run.load.rank_of_expert.size(), experts);
  require_size("rows_per_rank", run.load.rows_per_rank.size(), ranks);

  require_size("node_of_rank", run.configuration.node_of_rank.size(), ranks);
  require_nodes(run.configuration);

  require_counts("dispatch traffic_bytes", run.dispatch.traffic_bytes);
  require_counts("combine traffic_bytes", run.combine.traffic_bytes);
  require_counts("routes_per_expert", run.load.routes_per_expert);
  require_counts("rows_per_rank", run.load.rows_per_rank);
  require_placement(run.load.rank_of_expert, run.configuration.ranks);
  require_times(run);
}

}  // namespace ferry::report
