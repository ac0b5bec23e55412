// The fixture of tests in which one of several ranks, all processes of one host, fails. Survivors report
// their errors in memory that they share with the test.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <optional>

#include "harness/device.hpp"
#include "harness/harness.hpp"

namespace ferry::contract {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point time) {
  return std::chrono::duration<double>(Clock::now() - time).count();
}

inline constexpr int kRanks = 3, kMostRanks = 4, kVictim = 1;
inline constexpr Setup kCudaProcesses{BackendKind::cuda, RankKind::processes};

// A rank's report. All processes share it.
struct RankReport {
  std::atomic<int> code, peer, waiting_rank, node, role;
  std::atomic<double> seconds;  // from the start of the call with the fault to its error
  std::atomic<bool> later_calls_throw;
  std::atomic<bool> destroyed_exchange;  // destruction waits for the device: no kernel is left
  std::atomic<bool> others_work;         // other backends, in the same process afterwards
};

template <class Parameter>
class FaultTest : public testing::TestWithParam<Parameter> {
 protected:
  void SetUp() override {
    if (const std::string reason = skip_reason(kCudaProcesses); !reason.empty()) GTEST_SKIP() << reason;
    void* memory = mmap(nullptr, sizeof(RankReport) * kMostRanks, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    reports_ = static_cast<RankReport*>(memory);
  }
  void TearDown() override {
    if (reports_ != nullptr) munmap(reports_, sizeof(RankReport) * kMostRanks);
  }

  RankReport* reports_ = nullptr;
};

inline TestCase fault_case(double deadline, int ranks = kRanks) {
  TestCase c;
  c.seed = seed_of(1);
  c.ranks = ranks;
  c.config.backend = BackendKind::cuda;
  c.config.experts = 3 * ranks;
  c.config.top_k = 3;
  c.config.deadline = deadline;
  c.full = true;
  return c;
}

inline bool throws_again(SyncExchange& exchange, const TestCase& c) {
  try {
    DispatchRun(exchange, c, make_inputs(c)).call();
  } catch (const ferry::Error& error) {
    return error.code() == ErrorCode::timeout || error.code() == ErrorCode::peer_lost;
  }
  return false;
}

template <class Failure>
void record_failure(RankReport& report, const Failure& error) {
  report.code = static_cast<int>(error.code());
  report.peer = error.record.peer;
  report.waiting_rank = error.record.rank;
  report.node = error.record.node;
  report.role = static_cast<int>(error.record.role);
}

// Makes a call with the backend cpu and one with cuda, in new groups of threads. After a failure the process
// must be able to. Throws otherwise.
inline void use_other_backends(int gpu_ranks) {
  for (const BackendKind backend : {BackendKind::cpu, BackendKind::cuda}) {
    TestCase c;
    c.seed = seed_of(2);
    c.ranks = backend == BackendKind::cuda ? gpu_ranks : 2;
    c.config.backend = backend;
    c.config.experts = 4;
    c.config.top_k = 2;
    c.config.deadline = 3;
    const StepInputs step = make_inputs(c);
    const oracle::ExpertOutputs outputs = make_expert_outputs(c, step);
    Group::threads(c.ranks).run([&](const Rank& rank) {
      std::optional<device::RankScope> scope;
      if (backend == BackendKind::cuda) scope.emplace(device_number(rank, backend));
      SyncExchange exchange(rank, c.config);
      dispatch_and_combine(exchange, c, step, outputs);
    });
  }
}

// Expects that a rank reported an error of this kind about the victim, within `seconds`.
inline void expect_failure(const RankReport& report, int rank, ErrorCode code, double seconds,
                           int victim = kVictim) {
  EXPECT_EQ(static_cast<ErrorCode>(report.code.load()), code);
  EXPECT_EQ(report.peer, victim);
  EXPECT_EQ(report.waiting_rank, rank);
  EXPECT_LT(report.seconds, seconds);
  EXPECT_TRUE(report.later_calls_throw);
}

}  // namespace ferry::contract
