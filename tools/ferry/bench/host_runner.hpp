// One rank's part in a point of a bench.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "ferry/exchange.hpp"
#include "ferry/group.hpp"
#include "memory/local_memory.hpp"
#include "tools/ferry/bench/inputs.hpp"
#include "tools/ferry/bench/point.hpp"

namespace ferry::app {

// Plays the point over its ranks: checks every set, then times. Throws CheckFailed when a check fails.
BenchResult run_host_bench(const BenchPoint& point);

// When a rank began and ended something, in seconds of the system's steady clock, which processes share.
struct Span {
  double begin = 0, end = 0;
};

// What a rank leaves for the process that started it; the spans lie in memory that processes share.
struct RankCounts {
  std::int64_t dispatch_wire_bytes, combine_wire_bytes, rows, rows_checked;  // of one round over the sets
};

class HostBenchRunner {
 public:
  // `spans`: of this rank, `kTimed` kinds for every repetition.
  enum Timed : int { kDispatch, kCombine, kMemcpy, kTimed };

  HostBenchRunner(const Rank& rank, const BenchPoint& point, const BenchInputs& inputs, Span* spans,
              RankCounts& notes);

  void play();

 private:
  void check(int set);
  void fill_outputs(const DispatchResult& received, int set);
  DispatchResult dispatch(int set);
  void combine(int set);
  void time(int repetition);
  void time_one(Span& span, const std::function<void()>& work);

  Rank rank_;
  const BenchPoint& point_;
  const BenchInputs& inputs_;
  Span* spans_;
  RankCounts& notes_;
  Exchange exchange_;
  std::array<LocalMemory, BenchInputs::kSets> tokens_;
  std::array<Plan, BenchInputs::kSets> plans_;
  std::array<LocalMemory, BenchInputs::kSets> row_weights_;
  LocalMemory result_;
  LocalMemory own_outputs_;  // fp8: experts' rows are of another type than what arrived
  Outputs outputs_;
  LocalMemory copy_from_, copy_to_;
};

}  // namespace ferry::app
