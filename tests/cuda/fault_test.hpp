// What tests share in which one of several ranks, all processes of one host, fails: the others' errors.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>

#include "harness/device.hpp"
#include "harness/harness.hpp"

namespace ferry::contract {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point time) {
  return std::chrono::duration<double>(Clock::now() - time).count();
}

inline constexpr int kRanks = 3, kVictim = 1;
inline constexpr Setup kOnProcesses{BackendKind::cuda, RanksAre::processes};

// What a rank saw, in memory that parent and children share.
struct Seen {
  std::atomic<int> code, peer, waiting;
  std::atomic<double> seconds;  // from the fault's call on
  std::atomic<bool> later_calls_throw;
  std::atomic<bool> ended;  // its exchange is gone, and with it all that its device ran for it
};

template <class Parameter>
class FaultTest : public testing::TestWithParam<Parameter> {
 protected:
  void SetUp() override {
    if (const std::string reason = why_not(kOnProcesses); !reason.empty()) GTEST_SKIP() << reason;
    void* memory =
        mmap(nullptr, sizeof(Seen) * kRanks, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    seen_ = static_cast<Seen*>(memory);
  }
  void TearDown() override {
    if (seen_ != nullptr) munmap(seen_, sizeof(Seen) * kRanks);
  }

  Seen* seen_ = nullptr;
};

inline Case fault_case(double deadline) {
  Case c;
  c.seed = seed_of(1);
  c.ranks = kRanks;
  c.config.backend = BackendKind::cuda;
  c.config.experts = 9;
  c.config.top_k = 3;
  c.config.deadline = deadline;
  c.full = true;
  return c;
}

inline bool throws_again(Exchange& exchange, const Case& c) {
  try {
    DispatchRun(exchange, c, make_step(c)).call();
  } catch (const ferry::Error& error) {
    return error.code() == ErrorCode::timeout || error.code() == ErrorCode::peer_lost;
  }
  return false;
}

template <class Failure>
void note(Seen& seen, const Failure& error) {
  seen.code = static_cast<int>(error.code());
  seen.peer = error.record.peer;
  seen.waiting = error.record.rank;
}

}  // namespace ferry::contract
