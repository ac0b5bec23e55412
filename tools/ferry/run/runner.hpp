// One rank of a run.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "ferry/group.hpp"
#include "tools/ferry/common/progress.hpp"
#include "tools/ferry/run/device_context.hpp"
#include "tools/ferry/run/run_spec.hpp"
#include "tools/ferry/run/shared_results.hpp"

namespace ferry::app {

class StepOracle;

// How far a run is, of all ranks together. Made before they start.
struct Stages {
  explicit Stages(const RunOptions& options)
      : starting("starting, rank", options.ranks),
        checking("checking, step", options.steps, std::int64_t{kChecksOfStep} * options.ranks),
        timing("timing, step", options.steps, options.ranks) {}

  static constexpr int kChecksOfStep = 3;  // what must come, elementwise experts, SwiGLU
  Progress starting, checking, timing;
};

// Plays every step twice: checked, with elementwise experts and with SwiGLU; then timed, with SwiGLU and
// nothing in between. Collective: made and played on every rank.
class Player {
 public:
  using Clock = std::chrono::steady_clock;

  // Times count from `start`, one moment for all ranks.
  Player(const Rank& rank, const Job& job, Clock::time_point start, const Board& board, const Stages& stages);

  void play();

 private:
  struct Step;

  void check_steps();
  void check_exact(const Step& step, StepOracle& oracle, const std::vector<float>& x);
  void check_swiglu(const Step& step, const std::vector<float>& x);
  void combine();
  void time_steps();
  void time_step(const Step& step, report::StepTimes& times);

  Step make_step(int number) const;
  void count(const DispatchResult& received);
  double now_us() const;

  const Rank& rank_;
  const Job& job_;
  Clock::time_point start_;
  const Board& board_;
  const Stages& stages_;
  RankResults& mine_;
  std::unique_ptr<Site> site_;
  std::vector<std::uint64_t> hashes_;  // [steps] of the checked SwiGLU results
};

}  // namespace ferry::app
