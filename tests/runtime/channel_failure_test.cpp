// Channel: calls whose peers are late, leave, fail or are interrupted.
#include <gtest/gtest.h>

#include "group/waiter.hpp"
#include "runtime/channel_support.hpp"
#include "runtime/group_kinds.hpp"

namespace ferry::test {
namespace {

class ChannelFailures : public testing::TestWithParam<GroupKind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, ChannelFailures, testing::ValuesIn(kGroupKinds),
                         [](const auto& kind) { return name(kind.param); });

TEST_P(ChannelFailures, EveryRankGetsATimeoutWithItsRecord) {
  constexpr double kDeadline = 0.3;
  run_ranks(GetParam(), 4, 30, [](const Rank& rank) {
    TestLane lane(rank, kDeadline);
    for (int i = 0; i < 6; ++i) lane.exchange();
    rank.barrier();
    if (rank.index() == 3) {
      sleep_seconds(1.0);
      expect_thrown<TimeoutError>([&] { lane.channel.begin(Operation::combine, {}); });
      return;
    }
    const Stopwatch watch;
    const auto error = expect_thrown<TimeoutError>([&] { lane.exchange(Operation::combine); });
    FERRY_CHECK(watch.seconds() > 0.9 * kDeadline && watch.seconds() < kDeadline + 1.0, str(watch.seconds()));
    const WaitRecord& record = error.record;
    FERRY_CHECK(record.operation == Operation::combine && record.call == 7, describe(record));
    FERRY_CHECK(record.rank == rank.index() && record.peer == 3, describe(record));
    FERRY_CHECK(record.expected == 7 && record.observed <= 7, describe(record));
    // The failure is final for the lane and for the group.
    expect_thrown<TimeoutError>([&] { lane.channel.begin(Operation::dispatch, {}); });
    expect_thrown<TimeoutError>([&] { rank.barrier(); });
    expect_thrown<TimeoutError>([&] { SymmetricMemory(rank, 64); });
  });
}

thread_local bool interrupted = false;

TEST_P(ChannelFailures, AnInterruptedWaitFailsTheWholeGroup) {
  interrupt_requested = [] { return interrupted; };
  run_ranks(GetParam(), 3, 30, [](const Rank& rank) {
    TestLane lane(rank, 30);
    lane.exchange();
    interrupted = rank.index() == 1;
    if (rank.index() == 0) sleep_seconds(1.0);
    const Stopwatch watch;
    const auto error = expect_thrown<PeerLostError>([&] { lane.exchange(); });
    FERRY_CHECK(watch.seconds() < 2.0, str(watch.seconds()));
    require_text(error, "rank 1 was interrupted: rank 1 waited for rank 0");
    FERRY_CHECK(error.record.peer == 1 && error.record.rank == rank.index(), describe(error.record));
    interrupted = false;
  });
  interrupt_requested = nullptr;
}

TEST_P(ChannelFailures, WaitingForAPeerThatHasLeftFails) {
  run_ranks(GetParam(), 3, 30, [](const Rank& rank) {
    TestLane lane(rank, 30);
    lane.exchange();
    if (rank.index() == 0) return;
    const Stopwatch watch;
    const auto error = expect_thrown<PeerLostError>([&] { lane.exchange(); });
    FERRY_CHECK(watch.seconds() < 1.0, str(watch.seconds()));
    require_text(error, "rank 0 has left");
    FERRY_CHECK(error.record.peer == 0 && error.record.call == 2, describe(error.record));
  });
}

TEST_P(ChannelFailures, APeerMayLeaveAfterItHasPosted) {
  run_ranks(GetParam(), 4, 30, [](const Rank& rank) {
    TestLane lane(rank, 30);
    for (int i = 0; i < 50; ++i) lane.exchange();
    lane.send(Operation::dispatch, {});
    if (rank.index() == 0) return;
    sleep_seconds(0.02 * rank.index());
    lane.receive([] {});
  });
}

TEST_P(ChannelFailures, ARefusalKeepsItsErrorIfTheRankThenThrows) {
  try {
    run_ranks(GetParam(), 3, 30, [](const Rank& rank) {
      TestLane lane(rank, 30);
      lane.exchange();
      if (rank.index() == 1) {
        const UsageError error("bad argument");
        lane.channel.refuse(Operation::dispatch, error);
        throw error;
      }
      sleep_seconds(0.05);
      // Rank 1 may have thrown by now. Then begin() throws that failure; a call that has begun gets the
      // refusal.
      try {
        lane.send(Operation::dispatch, {});
      } catch (const PeerLostError& lost) {
        require_text(lost, "bad argument");
        return;
      }
      require_text(expect_thrown<UsageError>([&] { lane.receive([] {}); }),
                   "rank 1 refused dispatch 2: bad argument");
    });
    FAIL() << "run() threw nothing";
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(), "bad argument");
  } catch (const std::runtime_error& error) {
    EXPECT_EQ(GetParam(), GroupKind::custom_processes);
    EXPECT_STREQ(error.what(), "ended badly: rank 1 with status 256");
  }
}

}  // namespace
}  // namespace ferry::test
