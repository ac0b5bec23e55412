// One point of a `ferry bench` sweep: its shape and routing, the calls that are timed there, and their times.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ferry/config.hpp"
#include "ferry/trace.hpp"
#include "tools/report/summary.hpp"

namespace ferry::app {

struct BenchPoint {
  const Trace* trace = nullptr;
  int ranks = 0;
  bool processes = false;
  int hosts = 1;   // simulated
  int tokens = 0;  // per rank and call
  Config config;
  DType type = DType::bf16;  // of tokens, experts' rows and results
  float global_scale = 1;    // g of nvfp4

  // Calls that a rank issues back to back and that are timed together. More than 1 for short calls.
  int launches = 1;
  int repetitions = 0;

  std::int64_t token_bytes() const { return config.hidden * bytes_of(type); }
  // Bytes of one rank's result in a call.
  std::int64_t result_bytes() const {
    return tokens * token_bytes() * (config.reduction == Reduction::unreduced ? config.top_k : 1);
  }
};

// Seconds of a call.
struct BenchTimes {
  double p50 = 0;
  std::optional<double> p99{};  // of a hundred calls or more
};

inline BenchTimes times_of(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  BenchTimes times{.p50 = report::percentile(seconds, 50)};
  if (seconds.size() >= 100) times.p99 = report::percentile(seconds, 99);
  return times;
}

// Seconds of the slowest rank by replay. `seconds` is indexed by rank, then by replay.
inline std::vector<double> slowest(const std::vector<std::vector<double>>& seconds) {
  std::vector<double> most = seconds.front();
  for (const std::vector<double>& rank : seconds) {
    for (std::size_t replay = 0; replay < most.size(); ++replay)
      most[replay] = std::max(most[replay], rank[replay]);
  }
  return most;
}

// Routes of a call over all ranks, mean over the input sets.
struct BenchRouting {
  std::int64_t routes = 0;        // N * K without masked slots
  std::int64_t pairs = 0;         // distinct (token, destination rank)
  std::int64_t remote_pairs = 0;  // pairs whose destination is not the token's source rank
  double busiest_share = 0;       // the busiest rank's share of the routes
};

// ---- measured on the CPU

// A dispatch or combine over all ranks.
struct HostCall {
  BenchTimes seconds;      // from the first rank's start to the last rank's end
  double wire_bytes = 0;   // written to other ranks' memory
  double moved_bytes = 0;  // tokens or rows read, wire bytes written and read, rows or results written

  double bytes_per_second() const { return moved_bytes / seconds.p50; }
};

struct HostBenchRow {
  BenchPoint point;
  int rank = 0;  // collective: of this process
  BenchRouting routing;
  double rows = 0;  // received by all ranks in a dispatch, without padding
  HostCall dispatch, combine;
  double memcpy_before = 0, memcpy_after = 0;  // bytes per second by as many threads as ranks
  std::int64_t rows_checked = 0;               // compared before timing

  double memcpy_bytes_per_second() const { return (memcpy_before + memcpy_after) / 2; }
  // Whether other work shared the cores meanwhile: the rates differ by more than a quarter.
  bool unsteady() const {
    return std::max(memcpy_before, memcpy_after) > 1.25 * std::min(memcpy_before, memcpy_after);
  }
};

// ---- measured on GPUs

enum class Work : int {
  dispatch = 0,       // dispatch from ids
  dispatch_plan = 1,  // dispatch from an existing plan
  combine = 2,
  pair = 3,      // dispatch from ids, then combine with its plan
  metadata = 4,  // token counts of a step
  nccl = 5,      // sort routes by rank, exchange counts, move the rows with an NCCL all-to-all-v
  nccl_rows = 6  // the all-to-all-v alone, with known counts
};

const char* to_string(Work work);

// A kind of call that is timed on GPUs.
struct TimedCall {
  Work work = Work::dispatch;
  Reduction reduction = Reduction::partial;  // of combine and pair
  bool weighted = false;                     // dispatch carries weights, and combine applies them if it can
  bool eager = false;                        // issued one by one; otherwise as graphs
  bool in_phases = false;                    // as a send phase and a receive phase; otherwise fused
  int sm_limit = 0;                          // 0: none

  bool dispatches() const { return work == Work::dispatch || work == Work::dispatch_plan; }
  bool combines() const { return work == Work::combine || work == Work::pair; }
  bool uses_nccl() const { return work == Work::nccl || work == Work::nccl_rows; }

  bool operator==(const TimedCall&) const = default;
};

// A point and the calls that are timed with one exchange.
struct GpuCase {
  BenchPoint point;
  std::vector<TimedCall> calls;
};

struct GpuTimes {
  BenchTimes seconds;                // of a call on the slowest rank
  double host_seconds = 0;           // eager only: time of the calling thread in a call, with an idle stream
  double wire_bytes = 0;             // of a rank in a call, mean over ranks
  double lower_bound_bytes = 0;      // that the busiest rank must send or receive
  double push_bytes_per_second = 0;  // best measured out of a rank with at most the call's SMs
  std::int64_t rows_checked = 0;     // by all ranks, before timing
  std::string skipped{};             // why nothing was timed

  // 0 if no byte has to leave its rank.
  double lower_bound_seconds() const {
    return push_bytes_per_second > 0 ? lower_bound_bytes / push_bytes_per_second : 0;
  }
  double wire_bytes_per_second() const { return seconds.p50 > 0 ? wire_bytes / seconds.p50 : 0; }
};

struct GpuBenchRow {
  BenchPoint point;
  BenchRouting routing;
  TimedCall call;
  GpuTimes times;
};

}  // namespace ferry::app
