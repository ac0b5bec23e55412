// What the tests of this folder share: ranks as threads, skipped where there is no device.
#pragma once

#include <gtest/gtest.h>

#include "cuda/device_run.hpp"
#include "harness/device.hpp"
#include "harness/harness.hpp"

namespace ferry::contract {

class OnDevices : public testing::Test {
 protected:
  static constexpr contract::Setup kThreads{BackendKind::cuda, contract::RanksAre::threads};

  void SetUp() override {
    if (const std::string reason = why_not(kThreads); !reason.empty()) GTEST_SKIP() << reason;
  }

  static void run(int ranks, const Case& c, const std::function<void(Rank)>& body) {
    run_ranks(kThreads, ranks, describe(c), body);
  }

  // Weights travel with the rows into the combine; N is drawn anew in every step.
  static Case device_case(std::uint64_t number, int ranks) {
    Case c;
    c.seed = seed_of(number);
    c.ranks = ranks;
    c.config.backend = BackendKind::cuda;
    c.config.experts = 4 * ranks + 1;
    c.config.top_k = 4;
    c.config.hidden = 256;
    c.config.max_tokens = 24;
    c.masked = 0.1;
    return c;
  }
};

// Keeps steps `first` to `first + count - 1` of a case.
inline void keep_steps(DeviceRun& play, const Case& c, int count, int first = 0) {
  for (int index = first; index < first + count; ++index) {
    const Step step = make_step(c, index);
    play.keep(step, make_outcome(c, step));
  }
}

// What the environment's variable says, or `otherwise`.
int from_environment(const char* name, int otherwise);

}  // namespace ferry::contract
