// Channel: successful calls, calls that a rank refuses, and calls whose options differ.
#include <gtest/gtest.h>

#include <array>

#include "runtime/channel_support.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

class Channels : public testing::TestWithParam<GroupKind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, Channels, testing::ValuesIn(kGroupKinds),
                         [](const auto& kind) { return name(kind.param); });

TEST_P(Channels, SummariesArriveIntactUnderRandomDelays) {
  for (const int ranks : {1, 2, 4, 7}) {
    run_ranks(GetParam(), ranks, kNoFaultDeadline, [](const Rank& rank) {
      TestLane lane(rank, kNoFaultDeadline);
      Random jitter(seed() + static_cast<std::uint64_t>(rank.index()));
      const auto delay = [&] {
        if (below(jitter, 50) == 0) sleep_seconds(below(jitter, 100) * 1e-6);
      };
      for (std::uint64_t call = 1; call <= 2000; ++call) {
        delay();
        lane.send(Operation::dispatch, {});
        FERRY_CHECK(lane.channel.call() == call, str(lane.channel.call()));
        delay();
        lane.receive(delay);
      }
    });
  }
}

TEST_P(Channels, LanesAreIndependent) {
  run_ranks(GetParam(), 3, kNoFaultDeadline, [](const Rank& rank) {
    const std::int64_t bytes = Channel::bytes(rank.size(), 8);
    SymmetricMemory memory(rank, 2 * bytes);
    Channel first(rank, memory.sections(0), 8, kNoFaultDeadline),
        second(rank, memory.sections(bytes), 8, kNoFaultDeadline);
    // The second lane's calls run between the send phase and the receive phase of the first lane's call.
    first.begin(Operation::dispatch, {});
    for (int peer = 0; peer < rank.size(); ++peer) first.post(peer);
    for (int i = 0; i < 3; ++i) {
      second.begin(Operation::combine, {});
      for (int peer = 0; peer < rank.size(); ++peer) second.post(peer);
      for (int peer = 0; peer < rank.size(); ++peer) second.wait(peer);
    }
    for (int peer = 0; peer < rank.size(); ++peer) first.wait(peer);
    FERRY_CHECK(first.call() == 1 && second.call() == 3, "");
  });
}

TEST_P(Channels, ARefusalReachesEveryPeerAndTheLaneContinues) {
  run_ranks(GetParam(), 4, kNoFaultDeadline, [](const Rank& rank) {
    TestLane lane(rank, kNoFaultDeadline);
    lane.exchange();
    if (rank.index() == 2) {
      lane.channel.refuse(Operation::dispatch, OverflowError("5 rows too many", {.rank = 1, .needed = 12}));
    } else {
      lane.send(Operation::dispatch, {});
      const auto error = expect_thrown<OverflowError>([&] { lane.receive([] {}); });
      require_text(error, "rank 2 refused dispatch 2: 5 rows too many");
      FERRY_CHECK(error.overflow.rank == 1 && error.overflow.needed == 12, "");
    }
    for (int i = 0; i < 5; ++i) lane.exchange();
    FERRY_CHECK(lane.channel.call() == 7, str(lane.channel.call()));
  });
}

TEST_P(Channels, ACallCanBeRefusedAfterItHasBegun) {
  run_ranks(GetParam(), 3, kNoFaultDeadline, [](const Rank& rank) {
    TestLane lane(rank, kNoFaultDeadline);
    lane.exchange();
    lane.channel.begin(Operation::combine, {});
    if (rank.index() == 0) {
      lane.channel.refuse(Operation::combine, UsageError("on second thoughts"));
    } else {
      lane.for_peers([&](int peer) { lane.write_summary(peer); });
      lane.for_peers([&](int peer) { lane.channel.post(peer); });
      require_text(expect_thrown<UsageError>([&] { lane.receive([] {}); }),
                   "rank 0 refused combine 2: on second thoughts");
    }
    lane.exchange();
    FERRY_CHECK(lane.channel.call() == 3, str(lane.channel.call()));
  });
}

TEST_P(Channels, ARefusalEndsTheCallBeforeALatePeerPosts) {
  run_ranks(GetParam(), 3, kNoFaultDeadline, [](const Rank& rank) {
    TestLane lane(rank, kNoFaultDeadline);
    lane.exchange();
    if (rank.index() == 1) sleep_seconds(1.0);
    if (rank.index() == 2) {
      lane.channel.refuse(Operation::dispatch, UsageError("no"));
    } else {
      const Stopwatch watch;
      lane.send(Operation::dispatch, {});
      require_text(expect_thrown<UsageError>([&] { lane.receive([] {}); }), "rank 2 refused dispatch 2: no");
      FERRY_CHECK(watch.own_seconds() < 0.8, str("waited for the late rank: ", watch.own_seconds()));
    }
    lane.exchange();
  });
}

// Ranks refuse at random, several calls in a row and several ranks at once, while slow ranks still read
// summaries.
TEST_P(Channels, NothingIsOverwrittenWhileItIsReadAfterRefusals) {
  for (const int ranks : {2, 4}) {
    run_ranks(GetParam(), ranks, kNoFaultDeadline, [](const Rank& rank) {
      TestLane lane(rank, kNoFaultDeadline);
      Random common(seed());
      Random jitter(seed() + 1 + static_cast<std::uint64_t>(rank.index()));
      const auto delay = [&] {
        if (below(jitter, 10) == 0) sleep_seconds(below(jitter, 300) * 1e-6);
      };
      for (std::uint64_t call = 1; call <= 1500; ++call) {
        std::vector<bool> refuses(rank.size());
        bool any_refuses = false;
        for (int peer = 0; peer < rank.size(); ++peer) any_refuses |= refuses[peer] = below(common, 3) == 0;
        if (refuses[rank.index()]) {
          lane.channel.refuse(Operation::dispatch, UsageError(str("call ", call)));
        } else {
          lane.send(Operation::dispatch, {});
          if (any_refuses) {
            require_text(expect_thrown<UsageError>([&] { lane.receive(delay); }),
                         str("refused dispatch ", call, ": call ", call));
          } else {
            lane.receive(delay);
          }
        }
        FERRY_CHECK(lane.channel.call() == call, str(lane.channel.call()));
      }
    });
  }
}

TEST_P(Channels, BothRanksNameTheOptionThatDiffers) {
  run_ranks(GetParam(), 3, kNoFaultDeadline, [](const Rank& rank) {
    TestLane lane(rank, kNoFaultDeadline);
    const std::array same = {ComparedOption{"format", 1}, ComparedOption{"weights", 7}};
    lane.exchange(Operation::dispatch, same);
    const std::array mine = {ComparedOption{"format", 1},
                             ComparedOption{"weights", rank.index() == 1 ? 8 : 7}};
    lane.send(Operation::dispatch, mine);
    const int other = rank.index() == 1 ? 0 : 1;
    const auto error = expect_thrown<UsageError>([&] { lane.receive([] {}); });
    require_text(error, str("dispatch 2: weights is ", mine[1].value, " on rank ", rank.index(), " and ",
                            rank.index() == 1 ? 7 : 8, " on rank ", other));
    lane.exchange(Operation::dispatch, same);
    lane.send(Operation::dispatch, std::span(same).first(rank.index() == 1 ? 1 : 2));
    require_text(
        expect_thrown<UsageError>([&] { lane.receive([] {}); }),
        rank.index() == 1 ? "dispatch 4 has 1 options on rank 1 and 2 on rank 0" : " and 1 on rank 1");
    lane.exchange(Operation::dispatch, same);
  });
}

// Of a header the epoch is the word before the options.
void* epoch_in_header(const TestLane& lane, std::int64_t option) {
  std::byte* const section = lane.memory.mine(128);
  for (std::byte* at = section; at < section + Channel::bytes(lane.rank.size(), kSummaryBytes); at += 8) {
    if (std::memcmp(at, &option, sizeof option) == 0) return at - sizeof(std::uint32_t);
  }
  throw std::runtime_error("no header with the option");
}

TEST_P(Channels, AHeaderOfAnotherEpochEndsTheCall) {
  run_ranks(GetParam(), 2, kNoFaultDeadline, [](const Rank& rank) {
    TestLane lane(rank, kNoFaultDeadline);
    lane.exchange();
    const std::array options = {ComparedOption{"number", 0x7a3b91c5d2e4f608}};
    lane.send(Operation::dispatch, options);
    rank.barrier();
    const std::uint32_t other = kFirstEpoch + 2;
    std::memcpy(epoch_in_header(lane, options[0].value), &other, sizeof other);
    require_text(
        expect_thrown<UsageError>([&] { lane.receive([] {}); }),
        str("dispatch 2: rank ", rank.index(), " is in epoch 1 and rank ", 1 - rank.index(), " in epoch 3"));
    for (int i = 0; i < 4; ++i) lane.exchange();
  });
}

TEST_P(Channels, BothRanksNameTheOperationsThatDiffer) {
  run_ranks(GetParam(), 2, kNoFaultDeadline, [](const Rank& rank) {
    TestLane lane(rank, kNoFaultDeadline);
    lane.exchange();
    lane.send(rank.index() == 0 ? Operation::dispatch : Operation::combine, {});
    const auto error = expect_thrown<UsageError>([&] { lane.receive([] {}); });
    require_text(error, rank.index() == 0 ? "call 2 of the lane is dispatch on rank 0 and combine on rank 1"
                                          : "call 2 of the lane is combine on rank 1 and dispatch on rank 0");
    for (int i = 0; i < 4; ++i) lane.exchange();
  });
}

}  // namespace
}  // namespace ferry::test
