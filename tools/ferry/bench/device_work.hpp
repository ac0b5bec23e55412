// What `ferry bench --backend cuda` times, and what was seen.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/ferry/bench/point.hpp"

namespace ferry::app {

enum class Work : int {
  dispatch = 0,       // from ids
  dispatch_plan = 1,  // from a plan that was kept
  combine = 2,
  pair = 3,      // dispatch from ids and the combine of its plan
  metadata = 4,  // counts of a step
  nccl = 5,      // routes sorted by rank, counts exchanged, all-to-all-v of their rows by NCCL
  nccl_rows = 6  // the all-to-all-v alone, its counts known
};

const char* to_string(Work work);

struct GpuWork {
  Work work = Work::dispatch;
  Reduction reduction = Reduction::partial;  // of combine and pair
  bool weighted = false;                     // weights travel and are applied where they can be
  bool eager = false;                        // call by call instead of graphs of them
  bool in_phases = false;                       // send half, receive half
  int sm_limit = 0;                          // 0: none

  bool dispatches() const { return work == Work::dispatch || work == Work::dispatch_plan; }
  bool combines() const { return work == Work::combine || work == Work::pair; }
  bool of_nccl() const { return work == Work::nccl || work == Work::nccl_rows; }

  bool operator==(const GpuWork&) const = default;
};

// With what means nothing to the work left out, so that equal work compares equal; none for a combination
// that no call has.
std::optional<GpuWork> normalised(GpuWork work, Layout layout);

// Works of one configuration.
struct GpuCase {
  BenchPoint point;
  std::vector<GpuWork> works;
};

struct GpuTimes {
  BenchTimes seconds;                // of a call, on the slowest rank
  double host_seconds = 0;           // eager: of the calling thread in a call, its stream idle
  double wire_bytes = 0;             // of a call, a rank's, mean over ranks
  double lower_bound_bytes = 0;            // that the busiest rank must send or receive
  double push_bytes_per_second = 0;  // best seen with at most the SMs of the call, out of a rank
  std::int64_t rows_checked = 0;     // of all ranks, before anything was timed
  std::string skipped{};             // why nothing was timed

  // 0: nothing has to cross.
  double lower_bound_seconds() const { return push_bytes_per_second > 0 ? lower_bound_bytes / push_bytes_per_second : 0; }
  double wire_bytes_per_second() const { return seconds.p50 > 0 ? wire_bytes / seconds.p50 : 0; }
};

struct GpuBenchRow {
  BenchPoint point;
  BenchRouting routing;
  GpuWork work;
  GpuTimes times;
};

}  // namespace ferry::app
