// What a finished run was and did: the value that `ferry run` fills, and that tables, JSON, pages and
// timelines are made from. Plain data; what follows from it (percentiles, means, bandwidths) is computed in
// summary.hpp.
//
// All sums are over the timed steps and over all ranks. A step is one dispatch, the experts and one combine
// on every rank. Times are microseconds since the run's start, by one clock for all ranks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ferry::report {

struct Played {
  std::string trace{};                  // name, such as synth:decode or olmoe_1b_7b/github
  bool synthesised = false;             // otherwise recorded
  std::string description{};            // in words, Trace::source
  std::string recipe{};                 // synthesised: the exact specification; recorded: empty
  std::optional<std::uint64_t> seed{};  // synthesised
  int layers = 0;                       // of the trace
  std::int64_t tokens = 0;              // of the trace, in one layer
  std::int64_t tokens_per_rank = 0;     // N, the same in every step
  int steps = 0;                        // timed
};

struct Configuration {
  std::string backend{};        // names as ferry::to_string and ferry run's options have them
  int ranks = 0;                // R
  std::string group{};          // what a rank is: threads, processes, mpi
  int experts = 0;              // E
  int top_k = 0;                // K
  int hidden = 0;               // H
  std::int64_t max_tokens = 0;  // T
  std::string layout{};
  std::string format{};
  std::string reduction{};
  std::string wire{};
  std::string expert_function{};  // in words, such as "SwiGLU, 1024 inner columns, fp32, OpenBLAS"
};

struct Machine {
  std::string cpu{};
  int cores = 0;  // that the run may use
  std::int64_t memory_bytes = 0;
  int memcpy_threads = 0;  // as many as ranks ...
  double memcpy_bytes_per_second =
      0.0;  // ... copy buffers touched before: bytes read plus bytes written; 0: not measured
};

struct Check {
  std::string name{};  // such as "dispatch, to the bit"
  bool passed = false;
  std::int64_t compared = 0;          // values or rows looked at
  std::int64_t wrong = 0;             // of these
  std::optional<double> error{};      // largest relative error, where the check allows one
  std::optional<double> tolerance{};  // that it allows
  std::string detail{};               // what was compared with what; for a failure, where it was first seen
};

struct Span {
  double begin_us = 0.0;
  double end_us = 0.0;
  double length_us() const { return end_us - begin_us; }
  bool operator==(const Span&) const = default;
};

enum class Phase : int { dispatch = 0, experts = 1, combine = 2 };
inline constexpr std::array<Phase, 3> kPhases{Phase::dispatch, Phase::experts, Phase::combine};
const char* to_string(Phase phase);

// One rank's step.
struct StepTimes {
  std::array<Span, kPhases.size()> phases{};
  Span& operator[](Phase phase) { return phases[static_cast<std::size_t>(phase)]; }
  const Span& operator[](Phase phase) const { return phases[static_cast<std::size_t>(phase)]; }
  bool operator==(const StepTimes&) const = default;
};

// What one direction carried.
struct Carried {
  // [ranks][ranks], row: rank that sends. The diagonal is what a rank keeps for itself, in the same bytes:
  // local, and never counted as wire bytes.
  std::vector<std::int64_t> traffic_bytes{};
  std::int64_t wire_bytes = 0;  // as the exchange counted them (WireCounts)
  std::int64_t messages = 0;
  // What bandwidth is computed from. dispatch: N*H values read, wire bytes written and read, rows written;
  // combine: rows read, wire bytes written and read, N*H values written. A path that moves less keeps this
  // number.
  std::int64_t moved_bytes = 0;
};

struct Load {
  std::vector<std::int64_t> routes_per_expert{};  // [experts]
  std::vector<int> rank_of_expert{};              // [experts], the placement
  std::vector<std::int64_t> rows_per_rank{};      // [ranks] arrived, padding not counted
  std::int64_t dropped_routes = 0;                // beyond the capacity
};

struct RunReport {
  std::string ferry_version{};
  std::string command{};     // as it was typed
  std::string started_at{};  // UTC, as 2026-11-21T04:00:00Z
  Played played{};
  Configuration configuration{};
  Machine machine{};
  std::vector<Check> checks{};
  std::vector<StepTimes> times{};  // [steps][ranks]
  Carried dispatch{};
  Carried combine{};
  Load load{};

  const StepTimes& at(int step, int rank) const {
    return times[static_cast<std::size_t>(step) * static_cast<std::size_t>(configuration.ranks) +
                 static_cast<std::size_t>(rank)];
  }
};

// Throws UsageError when a table does not have the size its counts ask for, a count is not positive, or a
// phase ends before it begins. Everything in this folder that takes a report calls it first.
void validate(const RunReport& run);

}  // namespace ferry::report
