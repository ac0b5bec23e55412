// The fixture of tests with ranks as threads on GPUs. Skips its tests where there is none.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>

#include "cuda/device_run.hpp"
#include "cuda/test_hooks.hpp"
#include "harness/device.hpp"
#include "harness/harness.hpp"

namespace ferry::contract {

// The values, then poison up to `bytes`.
inline std::vector<std::byte> padded(std::vector<std::byte> values, std::int64_t bytes) {
  values.resize(static_cast<std::size_t>(bytes), kPoison);
  return values;
}

class DeviceTest : public testing::Test {
 protected:
  static constexpr contract::Setup kThreads{BackendKind::cuda, contract::RankKind::threads};

  void SetUp() override {
    if (const std::string reason = skip_reason(kThreads); !reason.empty()) GTEST_SKIP() << reason;
    // A build without delays in kernels would pass a test of them without having run it.
    if (!kTestHooks && std::getenv("FERRY_JITTER") != nullptr)
      GTEST_SKIP() << "built without FERRY_TEST_HOOKS";
  }

  static void run(int ranks, const TestCase& c, const std::function<void(Rank)>& body) {
    run_ranks(kThreads, ranks, describe(c), body);
  }

  // Combine uses the received weights; every step draws N anew.
  static TestCase device_case(std::uint64_t number, int ranks) {
    TestCase c;
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

// Random delays inside the kernels of exchanges that are constructed while it exists (FERRY_JITTER, if it
// is set, decides).
class ScopedJitter {
 public:
  explicit ScopedJitter(const char* strength) : ours_(std::getenv("FERRY_JITTER") == nullptr) {
    if (ours_) setenv("FERRY_JITTER", strength, 1);
  }
  ~ScopedJitter() {
    if (ours_) unsetenv("FERRY_JITTER");
  }
  ScopedJitter(const ScopedJitter&) = delete;
  ScopedJitter& operator=(const ScopedJitter&) = delete;

 private:
  const bool ours_;
};

// Captures a dispatch and a combine. Call Rank::barrier() afterwards: no rank may allocate while another
// captures.
inline Graph capture_both(const Rank& rank, DeviceRun& device_run, cudaStream_t stream) {
  rank.barrier();
  return Graph(stream, [&] {
    device_run.dispatch(stream);
    device_run.combine(stream);
  });
}

// Adds the inputs of steps 0 to count - 1 as input sets, each with another g of nvfp4. `tokens`: if not
// empty, N of a rank in a set, two sets ahead of the rank before.
inline void add_steps(DeviceRun& device_run, const TestCase& c, int count,
                      const std::vector<int>& tokens = {}) {
  for (int index = 0; index < count; ++index) {
    TestCase one = c;
    one.global_scale *= static_cast<float>(1 + index);
    for (int rank = 0; rank < c.ranks && !tokens.empty(); ++rank)
      one.tokens.push_back(tokens[static_cast<std::size_t>(index + 2 * rank) % tokens.size()]);
    const StepInputs step = make_inputs(one, index);
    device_run.add_inputs(step, make_expert_outputs(one, step));
  }
}

}  // namespace ferry::contract
