// Runs one rank's part of `ferry run`: checks every step, then times every step.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ferry/group.hpp"
#include "tools/ferry/common/files.hpp"
#include "tools/ferry/run/device_context.hpp"
#include "tools/ferry/run/run_spec.hpp"
#include "tools/ferry/run/shared_results.hpp"

namespace ferry::app {

// Progress of the ranks that this process starts, or of the rank that it is. Construct it before they start.
struct RunProgress {
  RunProgress(int ranks, int steps)
      : starting("starting, rank", ranks),
        checking("checking, step", steps, std::int64_t{kChecksPerStep} * ranks),
        timing("timing, step", steps, ranks) {}

  static constexpr int kChecksPerStep = 3;  // expected rows, scaling experts, SwiGLU experts
  void mute() const {
    for (const Progress* one : {&starting, &checking, &timing}) one->mute();
  }
  Progress starting, checking, timing;
};

// Runs every step first with checks, once with scaling experts and once with SwiGLU experts, then timed, with
// SwiGLU experts and no checks in between. Collective: every rank constructs one and calls run().
class RankRunner {
 public:
  using Clock = std::chrono::steady_clock;

  // Times count from `start`, the same moment on all ranks. run() keeps in `stage` what the rank is doing,
  // for messages: "while step 3 of 16 was checked".
  RankRunner(const Rank& rank, const RunSpec& spec, Clock::time_point start, const SharedResults& results,
             const RunProgress& progress, std::string& stage);

  void run();

 private:
  struct Step;

  void check_steps();
  void check_exact(const Step& step, const std::vector<float>& x);
  void check_swiglu(const Step& step, const std::vector<float>& x);
  void dispatch_together();
  void combine_together();
  void time_steps();
  void time_step(const Step& step, report::StepTimes& times);

  Step make_step(int number) const;
  void count(const Step& step, const DispatchResult& received);
  double now_us() const;

  const Rank& rank_;
  const RunSpec& spec_;
  Clock::time_point start_;
  const SharedResults& results_;
  const RunProgress& progress_;
  std::string& stage_;
  RankResults& own_results_;
  std::unique_ptr<DeviceContext> context_;
  std::vector<std::uint64_t> hashes_;  // [steps] of the checked SwiGLU results
};

}  // namespace ferry::app
