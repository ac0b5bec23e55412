// The report of a finished run as plain data. `ferry run` fills it in; the table, JSON, page and timeline are
// made from it. Derived figures (percentiles, means, bandwidths) are computed in summary.hpp.
//
// All sums are over the timed steps and all ranks. A step is one dispatch, the experts and one combine on
// every rank. Times are microseconds since the run's start, by one clock for all ranks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace ferry::report {

// The routing trace, and how much of it was run.
struct TraceUse {
  std::string trace{};                  // name, such as synth:decode or olmoe_1b_7b/github
  bool synthesised = false;             // false: recorded
  std::string description{};            // in words, Trace::source
  std::string recipe{};                 // synthesised: the exact specification; recorded: empty
  std::optional<std::uint64_t> seed{};  // synthesised
  int layers = 0;                       // of the trace
  std::int64_t tokens = 0;              // of the trace, in one layer
  std::int64_t tokens_per_rank = 0;     // N, the same in every step
  int steps = 0;                        // timed steps
};

struct Configuration {
  std::string backend{};  // names are those of ferry::to_string
  int ranks = 0;          // R
  std::string group{};    // what a rank is: threads, processes, mpi
  int nodes = 1;
  bool simulated_nodes = false;     // the ranks do not really run on as many hosts
  std::vector<int> node_of_rank{};  // [ranks]
  std::string hops{};               // one or two
  std::string input = "own";        // own, replicated or gathered
  int experts = 0;                  // E
  int shared_experts = 0;           // S
  int top_k = 0;                    // K
  int hidden = 0;                   // H
  std::int64_t max_tokens = 0;      // T
  std::string layout{};
  std::string format{};
  std::string reduction{};
  std::string reduction_level{};  // rank or node
  std::string combine_type{};
  std::string expert_function{};  // in words, such as "SwiGLU, 1024 inner columns, fp32, OpenBLAS"
};

struct Machine {
  std::string cpu{};
  int cores = 0;  // that the run may use
  std::int64_t memory_bytes = 0;
  int memcpy_threads = 0;                // the number of ranks
  double memcpy_bytes_per_second = 0.0;  // bytes read plus bytes written by these threads; 0: not measured
};

struct Check {
  std::string name{};  // such as "dispatch, bit for bit"
  bool passed = false;
  std::int64_t compared = 0;          // values or rows
  std::int64_t wrong = 0;             // values or rows
  std::optional<double> error{};      // largest relative error, for a check with a tolerance
  std::optional<double> tolerance{};  // largest relative error allowed
  std::string detail{};               // what was compared with what; if it failed, where first
};

struct Span {
  double begin_us = 0.0;
  double end_us = 0.0;
  double length_us() const { return end_us - begin_us; }
  bool operator==(const Span&) const = default;
};

// The stages of a step, in their order.
enum class StepStage : int { dispatch = 0, experts = 1, combine = 2 };
inline constexpr std::array<StepStage, 3> kStages{StepStage::dispatch, StepStage::experts,
                                                  StepStage::combine};
const char* to_string(StepStage stage);

// When one rank began and ended each stage of one step.
struct StepTimes {
  std::array<Span, kStages.size()> stages{};
  Span& operator[](StepStage stage) { return stages[static_cast<std::size_t>(stage)]; }
  const Span& operator[](StepStage stage) const { return stages[static_cast<std::size_t>(stage)]; }
  bool operator==(const StepTimes&) const = default;
};

// The bytes that one direction, dispatch or combine, moved.
struct Traffic {
  // [ranks][ranks], indexed by sender, then receiver. The diagonal holds the bytes that stay on their rank,
  // which are not wire bytes.
  std::vector<std::int64_t> traffic_bytes{};
  std::int64_t wire_bytes = 0;  // to other ranks, as the exchange counted them (WireCounts)
  std::int64_t messages = 0;
  // The bytes that bandwidth is computed from. dispatch: N*H values read, wire bytes written and read, rows
  // written; combine: rows read, wire bytes written and read, N*H values written. The number is the same for
  // an implementation that moves less.
  std::int64_t moved_bytes = 0;
};

struct Load {
  std::vector<std::int64_t> routes_per_expert{};  // [experts]
  std::vector<int> rank_of_expert{};              // [experts]
  std::vector<std::int64_t> rows_per_rank{};      // [ranks] received, without padding and shared experts
  std::int64_t shared_rows_per_rank = 0;          // own tokens for the shared experts, on every rank
  std::int64_t dropped_routes = 0;                // beyond the capacity
};

struct RunReport {
  std::string ferry_version{};
  std::string command{};     // the command line
  std::string started_at{};  // UTC, as 2026-11-21T04:00:00Z
  TraceUse workload{};
  Configuration configuration{};
  Machine machine{};
  std::vector<Check> checks{};
  std::vector<StepTimes> times{};  // [steps][ranks]
  Traffic dispatch{};
  Traffic combine{};
  Load load{};
  // An earlier run, whose figures stand beside this one's in the table, the JSON and the page; or null.
  std::shared_ptr<const RunReport> compared_with{};

  const StepTimes& at(int step, int rank) const {
    return times[static_cast<std::size_t>(step) * static_cast<std::size_t>(configuration.ranks) +
                 static_cast<std::size_t>(rank)];
  }
};

// Every function of this folder that takes a report calls this first.
// @throws UsageError  an array has the wrong size, a count is not positive, or a stage ends before it begins
void validate(const RunReport& run);

}  // namespace ferry::report
