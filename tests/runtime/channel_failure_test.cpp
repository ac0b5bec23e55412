// Channel: calls whose peers are late, leave, fail or are interrupted.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>

#include "group/waiter.hpp"
#include "runtime/channel_support.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

class ChannelFailures : public testing::TestWithParam<GroupKind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, ChannelFailures, testing::ValuesIn(kGroupKinds),
                         [](const auto& kind) { return name(kind.param); });

TEST_P(ChannelFailures, EveryRankGetsATimeoutWithItsRecord) {
  constexpr double kDeadline = 0.3;
  const SharedValue<std::atomic<int>> gave_up;
  run_ranks(GetParam(), 4, 30, [&](const Rank& rank) {
    TestLane lane(rank, kDeadline);
    for (int i = 0; i < 6; ++i) lane.exchange();
    rank.barrier();
    if (rank.index() == 3) {
      await_ranks(gave_up, 3);
      expect_thrown<TimeoutError>([&] { lane.channel.begin(Operation::combine, {}); });
      return;
    }
    const Stopwatch watch;
    const auto error = expect_thrown<TimeoutError>([&] { lane.exchange(Operation::combine); });
    ++*gave_up;
    FERRY_CHECK(watch.seconds() > 0.9 * kDeadline && watch.own_seconds() < kDeadline + 1.0,
                str(watch.own_seconds()));
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
    FERRY_CHECK(watch.own_seconds() < 2.0, str(watch.own_seconds()));
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
    FERRY_CHECK(watch.own_seconds() < 1.0, str(watch.own_seconds()));
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

// How rank 1 departs after it has refused a call.
enum class Departure { raises, returns, exits };

// When the peers of rank 1 learn of the refusal.
enum class Moment {
  waiting,    // they wait in the refused call
  later,      // they begin the refused call after the departure
  one_behind  // rank 2 still holds back its header of the call before, so rank 0 has not finished that call
};

void depart(Departure departure, const UsageError& error) {
  if (departure == Departure::raises) throw error;
  if (departure == Departure::exits) _exit(0);
}

// Call 2, which rank 1 refuses, as one of its peers.
void call_after_refusal(TestLane& lane, Moment moment) {
  if (moment == Moment::later) sleep_seconds(0.3);
  lane.exchange();
}

TEST_P(ChannelFailures, ARefusalWinsOverTheDepartureOfItsRank) {
  const bool processes = GetParam() == GroupKind::processes || GetParam() == GroupKind::custom_processes;
  for (const Departure departure : {Departure::raises, Departure::returns, Departure::exits}) {
    if (departure == Departure::exits && !processes) continue;  // it would end the test
    for (const Moment moment : {Moment::waiting, Moment::later, Moment::one_behind}) {
      SharedValue<std::atomic<int>> refusals;
      const auto body = [&](const Rank& rank) {
        TestLane lane(rank, 30);
        rank.barrier();
        if (rank.index() == 2 && moment == Moment::one_behind) {
          lane.channel.begin(Operation::dispatch, {});
          for (const int peer : {1, 0}) {
            if (peer == 0) sleep_seconds(0.6);  // rank 1 departs meanwhile, and rank 0 waits
            lane.write_summary(peer);
            lane.channel.post(peer);
          }
          lane.receive([] {});
        } else {
          lane.exchange();
        }
        if (rank.index() == 1) {
          const UsageError error("bad argument");
          if (moment != Moment::later) sleep_seconds(0.1);
          lane.channel.refuse(Operation::dispatch, error);
          return depart(departure, error);
        }
        const auto error = expect_thrown<UsageError>([&] { call_after_refusal(lane, moment); });
        require_text(error, "rank 1 refused dispatch 2: bad argument");
        ++*refusals;
      };
      try {
        run_ranks(GetParam(), 3, 30, body);
      } catch (const std::exception& error) {
        EXPECT_NE(departure, Departure::returns) << error.what();
      }
      EXPECT_EQ(*refusals, 2) << "departure " << static_cast<int>(departure) << ", moment "
                              << static_cast<int>(moment);
    }
  }
}

// Ranks 0 and 1 see that rank 2 differs, and end. Rank 3 learns it although it waits for rank 2 itself, or
// begins the call when they have ended.
TEST_P(ChannelFailures, ADifferenceWinsOverTheDepartureOfItsRanks) {
  for (const bool late : {false, true}) {
    SharedValue<std::atomic<int>> told;
    const auto body = [&](const Rank& rank) {
      TestLane lane(rank, 30);
      lane.exchange();
      const std::array options = {ComparedOption{"format", rank.index() == 2 ? 3 : 1}};
      const auto call = [&] {
        if (rank.index() == 3 && late) sleep_seconds(0.4);
        lane.channel.begin(Operation::dispatch, options);
        for (const int peer : {0, 1, 2, 3}) {
          if (peer == rank.index()) continue;
          if (rank.index() == 2 && peer == 3 && !late) sleep_seconds(0.4);  // ranks 0 and 1 depart meanwhile
          lane.write_summary(peer);
          lane.channel.post(peer);
        }
        lane.receive([] {});
      };
      const auto error = expect_thrown<UsageError>(call);
      require_text(error, "format is ");
      ++*told;
      throw UsageError(error.what());
    };
    EXPECT_THROW(run_ranks(GetParam(), 4, 30, body), std::exception);
    EXPECT_EQ(*told, 4) << "late: " << late;
  }
}

// Rank 1 joins the call late, rank 2 never: the waits for both share the deadline.
TEST_P(ChannelFailures, TheDeadlineIsOfAllWaitsOfACall) {
  constexpr double kDeadline = 2;
  const SharedValue<std::atomic<int>> gave_up;
  run_ranks(GetParam(), 3, 30, [&](const Rank& rank) {
    TestLane lane(rank, kDeadline);
    lane.exchange();
    rank.barrier();
    if (rank.index() == 2) await_ranks(gave_up, 2);
    const Stopwatch watch;
    if (rank.index() == 1) sleep_seconds(0.8 * kDeadline);
    const auto error = expect_thrown<TimeoutError>([&] { lane.exchange(); });
    ++*gave_up;
    FERRY_CHECK(error.record.peer == 2, describe(error.record));
    FERRY_CHECK(watch.own_seconds() < (rank.index() == 2 ? 0.1 : 1.3) * kDeadline, str(watch.own_seconds()));
  });
}

}  // namespace
}  // namespace ferry::test
