// One point of a sweep of `ferry bench`, and what was seen there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ferry/config.hpp"
#include "ferry/trace.hpp"
#include "tools/ferry/bench/times.hpp"

namespace ferry::app {

struct BenchPoint {
  const Trace* trace = nullptr;
  int ranks = 0;
  bool processes = false;
  int tokens = 0;  // of a rank in a call
  Config config;
  DType type = DType::bf16;  // of tokens, experts' rows and results

  // Calls of a rank that are timed as one: short ones follow each other without the ranks meeting in between.
  int launches = 1;
  int repetitions = 0;

  std::int64_t token_bytes() const { return config.hidden * bytes_of(type); }
};

// All ranks together, mean of a call over the sets of inputs.
struct BenchRouting {
  std::int64_t routes = 0;        // N*K without masked slots
  std::int64_t pairs = 0;         // distinct (token, rank)
  std::int64_t remote_pairs = 0;  // of those, with a rank that is not the token's own
  double busiest_share = 0;       // of the routes, the part that goes to the busiest rank
};

struct BenchOperation {
  BenchTimes seconds;      // from the first rank's start to the last one's end
  double wire_bytes = 0;   // of a call, all ranks
  double moved_bytes = 0;  // of a call, all ranks: read, written to peers and read there, written

  double bytes_per_second() const { return moved_bytes / seconds.p50; }
};

struct BenchResult {
  BenchRouting routing;
  double rows = 0;  // of a dispatch, all ranks, padding not counted
  BenchOperation dispatch, combine;
  double memcpy_bytes_per_second = 0;  // by as many threads or processes, in turn with the calls
  std::int64_t rows_checked = 0;       // compared before anything was timed
};

}  // namespace ferry::app
