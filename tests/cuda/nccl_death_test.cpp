// Two ranks that make calls over NCCL, on one host, whether NCCL's communicators block or not: if one is
// killed, the other one gets its typed error in time, and its process can still use its GPU; if the device of
// one fails, both get an error at once.
#include <signal.h>
#include <stdlib.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "cuda/fault_test.hpp"
#include "cuda/other_work.hpp"
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

// A rank's calls, each a dispatch and a combine.
class PairCalls {
 public:
  explicit PairCalls(const Rank& rank)
      : work_(rank.index()), exchange_(rank, pair_config()), stream_(device::stream(rank.index())) {
    std::memset(x_, 0, static_cast<std::size_t>(kPairTokens * kPairRowBytes));
    for (std::int32_t token = 0; token < kPairTokens; ++token) {
      const std::int32_t expert = token % kPair;
      std::memcpy(ids_ + std::int64_t{4} * token, &expert, 4);
    }
  }

  void step() {
    const DispatchResult rows = exchange_.dispatch(Tokens::rows(x_, kPairTokens, DType::bf16),
                                                   reinterpret_cast<const std::int32_t*>(ids_), nullptr,
                                                   {.call = {.stream = stream_}});
    exchange_.combine({rows.data, DType::bf16}, rows.plan, {y_, DType::bf16}, {.call = {.stream = stream_}});
    exchange_.synchronize({.stream = stream_});
  }
  Stream stream() const { return stream_; }

 private:
  const device::RankScope work_;
  ferry::Exchange exchange_;
  const Stream stream_;
  std::byte* const x_ = device::allocate(kPairTokens * kPairRowBytes);
  std::byte* const y_ = device::allocate(kPairTokens * kPairRowBytes);
  std::byte* const ids_ = device::allocate(kPairTokens * 4);
};

void call_until_a_rank_dies(const Rank& rank, int milliseconds, RankReport& report) {
  PairCalls calls(rank);
  const auto step = [&] { calls.step(); };
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

// The victim's device fails before a dispatch. Its process stays until the other rank has its error.
void call_on_a_failed_device(const Rank& rank, RankReport* reports) {
  PairCalls calls(rank);
  for (int i = 0; i < 3; ++i) calls.step();
  rank.barrier();
  if (rank.index() == kVictim) fail_device(static_cast<cudaStream_t>(calls.stream().handle));
  const Clock::time_point start = Clock::now();
  RankReport& report = reports[rank.index()];
  try {
    calls.step();
  } catch (const SystemError& error) {
    report.seconds = seconds_since(start);
    if (std::strstr(error.what(), "rank 1 refused dispatch 7: ") != nullptr) report.peer = kVictim;
    report.code = static_cast<int>(error.code());
  }
  if (rank.index() != kVictim) return;
  while (reports[1 - kVictim].code == 0 && seconds_since(start) < 2 * kPairDeadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  raise(SIGKILL);
}

TEST_P(NcclDeath, AFailedDeviceEndsTheCallOfBothRanksAtOnce) {
  Group group = Group::processes(kPair);
  group.set_deadline(30);
  EXPECT_THROW(group.run([&](Rank rank) { call_on_a_failed_device(rank, reports_); }), PeerLostError);
  for (int rank = 0; rank < kPair; ++rank) {
    EXPECT_EQ(static_cast<ErrorCode>(reports_[rank].code.load()), ErrorCode::system);
    EXPECT_EQ(reports_[rank].peer, rank == kVictim ? 0 : kVictim);
    EXPECT_LT(reports_[rank].seconds, kPairDeadline / 2);
  }
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
