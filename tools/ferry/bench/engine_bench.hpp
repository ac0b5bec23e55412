// The measurements of `ferry bench` for the backend `collective` on GPUs: calls, and beside them their lower
// bound, an all-to-all-v of their messages and a copy of their bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/ferry/bench/point.hpp"

namespace ferry::app {

// Seconds over the rounds, each of its slowest rank.
struct RoundTimes {
  double p50 = 0, least = 0, most = 0;
};

RoundTimes round_times(const std::vector<double>& seconds);  // at least one

struct EngineCall {
  RoundTimes call;
  RoundTimes all_to_all;        // of the same messages; 0: not measured
  RoundTimes copy;              // of as many bytes as the call packs and unpacks, messages and rows
  double wire_bytes = 0;        // that a rank sends to others, mean over ranks and input sets
  double between_nodes = 0;     // of these
  double all_to_all_bytes = 0;  // that the all-to-all-v carries for a rank, likewise
  double copied_bytes = 0;      // of a rank, likewise

  double bound_seconds() const { return all_to_all.p50 > 0 ? all_to_all.p50 + copy.p50 : 0; }
  // 0: without a bound.
  double ratio() const { return bound_seconds() > 0 ? call.p50 / bound_seconds() : 0; }
};

struct EngineBenchRow {
  BenchPoint point;
  int rank = 0;  // of this process
  int nodes = 1;
  std::string engine;      // with its version
  bool registers = false;  // FERRY_NCCL_REGISTER is on
  std::string gpu;
  BenchRouting routing;
  std::int64_t rows_checked = 0;  // by all ranks, before timing
  EngineCall dispatch, combine;
};

// The ranks are processes that mpirun has started. Each works on the GPU of its local rank, and on simulated
// hosts on that of its rank.
// @throws CheckFailed       a check has failed
// @throws UnsupportedError  this build or machine has no GPU
EngineBenchRow run_engine_point(const BenchPoint& point);

}  // namespace ferry::app
