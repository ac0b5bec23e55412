// The engine `nccl` with communicators that block, over a library that stands in for NCCL.
#include <gtest/gtest.h>

#include <atomic>
#include <string>

#include "engine/nccl_ranks.hpp"
#include "engine/transfers.hpp"
#include "ferry/error.hpp"
#include "group/rank_state.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

TEST(NcclBlocking, MovesTheBytesOfEveryPairAndEndsInOrder) {
  const Setting asks("FERRY_NCCL_BLOCKING", "1");
  const int made = nccl_calls("blocking"), destroyed = nccl_calls("destroy"), aborted = nccl_calls("abort");
  run_nccl(3, [](Rank rank, Engine& engine) {
    const auto lanes = engine.communicators(2);
    OnDevice device(*lanes[1]);
    for (std::uint64_t round = 0; round < 20; ++round) {
      exchange_random(*lanes[0], rank.index(), 3, 5000, round);
      exchange_random(device, rank.index(), 3, 5000, 100 + round);
    }
  });
  EXPECT_EQ(nccl_calls("blocking") - made, 3);
  EXPECT_EQ(nccl_calls("destroy") - destroyed, 3);
  EXPECT_EQ(nccl_calls("abort"), aborted);
}

TEST(NcclBlocking, IsLeftOutUnlessItIsAskedFor) {
  const int made = nccl_calls("blocking");
  run_nccl(2, [](Rank rank, Engine& engine) {
    exchange_random(*engine.communicators(1)[0], rank.index(), 2, 500, 1);
  });
  EXPECT_EQ(nccl_calls("blocking"), made);
}

// A peer that never sends: the check ends the transfer, as with other communicators.
TEST(NcclBlocking, ACheckThatThrowsAbortsTheTransfer) {
  const Setting asks("FERRY_NCCL_BLOCKING", "1");
  const int aborted = nccl_calls("abort");
  run_nccl(
      2,
      [](Rank rank, Engine& engine) {
        const auto lanes = engine.communicators(1);
        if (rank.index() == 0) {
          const auto memory =
              std::make_shared<RankTransfer>(std::vector<std::vector<std::int64_t>>{{0, 8}, {8, 0}}, 0);
          EXPECT_THROW(
              lanes[0]->all_to_all_v(memory->arguments(), memory, [] { throw SystemError("enough", 1); }),
              SystemError);
        }
        rank.barrier();
      },
      1);
  EXPECT_GE(nccl_calls("abort") - aborted, 1);
}

// NCCL itself would wait for ever for the rank that is missing.
TEST(NcclBlocking, ConnectingEndsAtTheDeadline) {
  const Setting asks("FERRY_NCCL_BLOCKING", "1"), absent("FAKE_NCCL_ABSENT", "1");
  constexpr double kShort = 0.3;
  std::atomic<int> ended = 0;
  const auto body = [&](Rank, Engine& engine) {
    const Stopwatch watch;
    try {
      engine.communicators(1);
    } catch (const Error&) {
      ++ended;
      EXPECT_LT(watch.seconds(), kShort + 1);
      throw;
    }
  };
  EXPECT_THROW(run_nccl(2, body, kShort), TimeoutError);
  EXPECT_EQ(ended, 2);
}

}  // namespace
}  // namespace ferry::test
