// Runs one rank's part of `ferry run`: checks every step, then times every step.
#pragma once

#include <chrono>
#include <cstdint>

#include "ferry/group.hpp"
#include "tools/ferry/common/files.hpp"
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
// SwiGLU experts and no checks in between. Collective. Times count from `start`, the same moment on all
// ranks.
// @throws TimeoutError  says what the rank was doing: "while step 3 of 16 was checked"
void run_rank(const Rank& rank, const RunSpec& spec, std::chrono::steady_clock::time_point start,
              const SharedResults& results, const RunProgress& progress);

}  // namespace ferry::app
