// A rank that is killed while two ranks make calls over NCCL, on one host: the other one gets its typed error
// in time, whether NCCL's communicators block or not, and its process can still use its GPU.
#include <signal.h>
#include <stdlib.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "cuda/fault_test.hpp"
#include "runtime/support.hpp"
#include "seed.hpp"

namespace ferry::contract {
namespace {

constexpr int kPair = 2;
constexpr std::int64_t kPairTokens = 2048, kPairRowBytes = 2 * 4096;
constexpr double kPairDeadline = 5;

// FERRY_NCCL_BLOCKING, and the longest time until the rank is killed, in milliseconds.
struct Death {
  bool blocking;
  int most_milliseconds;
};

class NcclDeath : public FaultTest<Death> {
 protected:
  void SetUp() override {
    FaultTest::SetUp();
    if (device::count() < kPair) GTEST_SKIP() << "NCCL needs a GPU for each rank";
    setenv("FERRY_NCCL_BLOCKING", GetParam().blocking ? "1" : "0", 1);
  }
  void TearDown() override {
    unsetenv("FERRY_NCCL_BLOCKING");
    FaultTest::TearDown();
  }
};

Config pair_config() {
  return {.experts = kPair,
          .top_k = 1,
          .hidden = static_cast<int>(kPairRowBytes / 2),
          .max_tokens = kPairTokens,
          .backend = BackendKind::collective,
          .engine = EngineKind::nccl,
          .deadline = kPairDeadline};
}

void call_until_a_rank_dies(const Rank& rank, int milliseconds, RankReport& report) {
  const device::RankScope work(rank.index());
  ferry::Exchange exchange(rank, pair_config());
  std::byte* const x = device::allocate(kPairTokens * kPairRowBytes);
  std::byte* const y = device::allocate(kPairTokens * kPairRowBytes);
  std::byte* const ids = device::allocate(kPairTokens * 4);
  std::memset(x, 0, static_cast<std::size_t>(kPairTokens * kPairRowBytes));
  for (std::int32_t token = 0; token < kPairTokens; ++token) {
    const std::int32_t expert = token % kPair;
    std::memcpy(ids + std::int64_t{4} * token, &expert, 4);
  }
  const Stream stream = device::stream(rank.index());
  const auto step = [&] {
    const DispatchResult rows =
        exchange.dispatch(Tokens::rows(x, kPairTokens, DType::bf16),
                          reinterpret_cast<const std::int32_t*>(ids), nullptr, {}, stream);
    exchange.combine({rows.data, DType::bf16}, rows.plan, {y, DType::bf16}, {}, stream);
    exchange.synchronize(0, stream);
  };
  for (int i = 0; i < 3; ++i) step();
  rank.barrier();
  std::thread killer;
  if (rank.index() == kVictim) {
    killer = std::thread([=] {
      std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
      raise(SIGKILL);
    });
  }
  Clock::time_point start;
  try {
    while (true) {
      start = Clock::now();
      step();
    }
  } catch (const PeerLostError& error) {
    report.seconds = seconds_since(start);
    record_failure(report, error);
  } catch (const TimeoutError& error) {
    report.seconds = seconds_since(start);
    record_failure(report, error);
  }
  try {
    step();
  } catch (const PeerLostError&) {
    report.later_calls_throw = true;
  } catch (const TimeoutError&) {
    report.later_calls_throw = true;
  }
  TestCase c;
  c.seed = seed_of(2);
  c.ranks = 1;
  c.config.backend = BackendKind::cuda;
  c.config.experts = 4;
  c.config.top_k = 2;
  c.config.deadline = kPairDeadline;
  const StepInputs inputs = make_inputs(c);
  const oracle::ExpertOutputs outputs = make_expert_outputs(c, inputs);
  Group::threads(1).run([&](const Rank& alone) {
    SyncExchange other(alone, c.config);
    dispatch_and_combine(other, c, inputs, outputs);
    report.others_work = true;
  });
}

// The rank that is left notices the death within a second of its own, and NCCL's abort may take the rest.
TEST_P(NcclDeath, TheOtherRankGetsItsErrorInTime) {
  test::Random random(test::seed());
  const int milliseconds = 1 + test::below(random, GetParam().most_milliseconds);
  RecordProperty("milliseconds", milliseconds);
  Group group = Group::processes(kPair);
  group.set_deadline(30);
  EXPECT_THROW(
      group.run([&](Rank rank) { call_until_a_rank_dies(rank, milliseconds, reports_[rank.index()]); }),
      PeerLostError);
  const RankReport& survivor = reports_[1 - kVictim];
  EXPECT_EQ(static_cast<ErrorCode>(survivor.code.load()), ErrorCode::peer_lost);
  EXPECT_EQ(survivor.peer, kVictim);
  EXPECT_LT(survivor.seconds, kPairDeadline + 1);
  EXPECT_TRUE(survivor.later_calls_throw);
  EXPECT_TRUE(survivor.others_work);
}

INSTANTIATE_TEST_SUITE_P(Communicators, NcclDeath,
                         testing::Values(Death{false, 20}, Death{false, 200}, Death{true, 20},
                                         Death{true, 200}),
                         [](const testing::TestParamInfo<Death>& test) {
                           return std::string(test.param.blocking ? "blocking" : "polled") + "_within_" +
                                  std::to_string(test.param.most_milliseconds) + "_ms";
                         });

}  // namespace
}  // namespace ferry::contract
