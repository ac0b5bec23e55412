// Groups of every kind: joining, all_gather, barrier, and invalid arguments.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "base/text.hpp"
#include "runtime/channel_support.hpp"
#include "runtime/support.hpp"

namespace ferry::test {
namespace {

class Groups : public testing::TestWithParam<GroupKind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, Groups, testing::ValuesIn(kGroupKinds),
                         [](const auto& kind) { return name(kind.param); });

TEST_P(Groups, GatherTheBytesOfEveryRank) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    run_ranks(GetParam(), ranks, kNoFaultDeadline, [ranks](const Rank& rank) {
      FERRY_CHECK(rank.size() == ranks, "");
      std::uint64_t round = seed();
      for (const std::size_t bytes : {0, 1, 8, 4095, 4096, 4097, 50000}) check_gather(rank, ++round, bytes);
    });
  }
}

TEST_P(Groups, GatherInOrderUnderRandomDelays) {
  run_ranks(GetParam(), 4, kNoFaultDeadline, [](const Rank& rank) {
    Random jitter(seed() + static_cast<std::uint64_t>(rank.index()));
    for (int round = 0; round < 500; ++round) {
      if (below(jitter, 20) == 0) sleep_seconds(below(jitter, 200) * 1e-6);
      check_gather(rank, seed() + static_cast<std::uint64_t>(round), 16);
    }
  });
}

TEST_P(Groups, RefuseAGatherInWhichRanksPassDifferentNumbersOfBytes) {
  for (const std::size_t bytes : {0, 1, 4096, 50000}) {
    run_ranks(GetParam(), 3, kNoFaultDeadline, [bytes](const Rank& rank) {
      check_gather(rank, seed(), 8);  // what was gathered before is not taken for a part of the next
      const std::vector<std::byte> mine(bytes + 8, std::byte{1});
      std::vector<std::byte> all(mine.size() * 3);
      const auto error = expect_thrown<UsageError>(
          [&] { rank.all_gather(mine.data(), all.data(), rank.index() == 1 ? bytes : bytes + 8); });
      require_text(error, "every rank must pass the same number of bytes");
    });
  }
}

TEST_P(Groups, BarrierReturnsAfterEveryRankHasCalledIt) {
  using Times = std::chrono::steady_clock::duration;
  run_ranks(GetParam(), 5, kNoFaultDeadline, [](const Rank& rank) {
    Random jitter(seed() + static_cast<std::uint64_t>(rank.index()));
    for (int round = 0; round < 50; ++round) {
      sleep_seconds(below(jitter, 1000) * 1e-6);
      const Times before = std::chrono::steady_clock::now().time_since_epoch();
      rank.barrier();
      const Times after = std::chrono::steady_clock::now().time_since_epoch();
      std::vector<Times> all(rank.size());
      rank.all_gather(&before, all.data(), sizeof before);
      FERRY_CHECK(*std::max_element(all.begin(), all.end()) <= after, str("round ", round));
    }
  });
}

TEST_P(Groups, CanRunAgain) {
  if (GetParam() == GroupKind::custom_threads || GetParam() == GroupKind::custom_processes) {
    const TestBootstrap meeting(1);
    Group group = Group::custom(meeting.bootstrap(0));
    for (int i = 0; i < 3; ++i) group.run([](const Rank& rank) { rank.barrier(); });
    return;
  }
  Group group = GetParam() == GroupKind::threads ? Group::threads(3) : Group::processes(3);
  EXPECT_THROW(group.run([](const Rank& rank) {
    if (rank.index() == 1) throw UsageError("once");
    rank.barrier();
  }),
               UsageError);
  for (int i = 0; i < 3; ++i) group.run([](const Rank& rank) { rank.barrier(); });
}

TEST_P(Groups, ReportWhetherAllRanksAreThreadsOfOneProcess) {
  const bool threads = GetParam() == GroupKind::threads || GetParam() == GroupKind::custom_threads;
  run_ranks(GetParam(), 3, kNoFaultDeadline, [threads](const Rank& rank) {
    FERRY_CHECK(rank.same_process() == threads, str("rank ", rank.index()));
  });
}

using MakeGroup = Group (*)(int ranks, int nodes);
constexpr MakeGroup kMakers[] = {Group::threads, Group::processes};

TEST(Group, IsOneNodeUnlessNodesAreSimulated) {
  for (const MakeGroup make : kMakers) {
    make(3, 1).run([](const Rank& rank) {
      const Topology& topology = rank.topology();
      FERRY_CHECK(topology == Topology({7, 7, 7}) && !topology.simulated(), str(topology.nodes()));
    });
    make(6, 3).run([](const Rank& rank) {
      const Topology& topology = rank.topology();
      FERRY_CHECK(topology == Topology({0, 0, 1, 1, 2, 2}, true), str(topology.nodes()));
      check_gather(rank, seed(), 10000);
    });
  }
}

TEST(Group, RefusesNodesThatDoNotDivideTheRanks) {
  for (const int nodes : {-1, 0, 3, 5}) {
    for (const MakeGroup make : kMakers) {
      const auto error = expect_thrown<UsageError>([&] { make(4, nodes); });
      require_text(error, str("nodes = ", nodes, ", must divide the 4 ranks into nodes of equal size"));
    }
  }
}

TEST(Topology, NumbersNodesByTheirLowestRanks) {
  const Topology topology({9, 4, 9, 4, 4, -1});
  EXPECT_EQ(topology.ranks(), 6);
  EXPECT_EQ(topology.nodes(), 3);
  EXPECT_EQ(topology.ranks_of(0), (std::vector{0, 2}));
  EXPECT_EQ(topology.ranks_of(1), (std::vector{1, 3, 4}));
  EXPECT_EQ(topology.ranks_of(2), std::vector{5});
  EXPECT_EQ(topology.node_of(4), 1);
  EXPECT_EQ(topology.local_rank_of(4), 2);
  EXPECT_FALSE(topology.simulated());
}

TEST(Topology, RelaysHaveTheLocalRankOfTheSource) {
  // Nodes {0, 3, 5, 6, 8}, {1, 4} and {2, 7}, whose ranks are not consecutive; then nodes of 3 and 1 ranks.
  const Topology topology({0, 1, 2, 0, 1, 0, 0, 2, 0});
  EXPECT_EQ(topology.relay_of(1, 0), 0);
  EXPECT_EQ(topology.relay_of(4, 0), 3);
  EXPECT_EQ(topology.relay_of(7, 0), 3);
  EXPECT_EQ(topology.relay_of(5, 1), 1);  // local rank 2 mod 2
  EXPECT_EQ(topology.relay_of(6, 1), 4);
  EXPECT_EQ(topology.relay_of(8, 2), 2);
  EXPECT_EQ(topology.relay_of(4, 2), 7);
  const Topology uneven({0, 0, 1, 0});
  for (const int source : {0, 1, 3}) EXPECT_EQ(uneven.relay_of(source, 1), 2);
  EXPECT_EQ(uneven.relay_of(2, 0), 0);
}

TEST(Group, RefusesInvalidArguments) {
  EXPECT_THROW(Group::threads(0), UsageError);
  EXPECT_THROW(Group::processes(-1), UsageError);
  EXPECT_THROW(Group::custom({}), UsageError);
  const TestBootstrap meeting(2);
  Bootstrap bootstrap = meeting.bootstrap(0);
  bootstrap.rank = 2;
  EXPECT_THROW(Group::custom(bootstrap), UsageError);
  Group group = Group::threads(1);
  EXPECT_THROW(group.set_deadline(0), UsageError);
  EXPECT_THROW(group.set_deadline(-1), UsageError);
}

TEST(Group, AJoinedRankLeavesWhenItsLastHandleIsDestroyed) {
  const TestBootstrap meeting(2);
  std::thread other([&] {
    Group group = Group::custom(meeting.bootstrap(1));
    Rank rank = group.join();
    const Rank copy = rank;
    rank.barrier();
  });
  Group group = Group::custom(meeting.bootstrap(0));
  const Rank rank = group.join();
  EXPECT_EQ(rank.size(), 2);
  rank.barrier();
  EXPECT_THROW(rank.barrier(), PeerLostError);
  other.join();
  EXPECT_THROW(Group::threads(2).join(), UsageError);
}

TEST(Group, RefusesToBeJoinedTwice) {
  const TestBootstrap meeting(1);
  Group group = Group::custom(meeting.bootstrap(0));
  {
    const Rank rank = group.join();
    require_text(expect_thrown<UsageError>([&] { group.join(); }), "rank 0 is in the group already");
    require_text(expect_thrown<UsageError>([&] { group.run([](const Rank&) {}); }),
                 "rank 0 is in the group already");
    rank.barrier();
  }
  group.join().barrier();
}

TEST(Group, RefusesABootstrapThatMixesUpRanks) {
  Bootstrap bootstrap;
  bootstrap.rank = 0;
  bootstrap.ranks = 2;
  bootstrap.all_gather = [](const void* mine, void* all, std::size_t bytes) {
    std::memcpy(all, mine, bytes);
    std::memcpy(static_cast<std::byte*>(all) + bytes, mine, bytes);
  };
  bootstrap.barrier = [] {};
  Group group = Group::custom(bootstrap);
  EXPECT_THROW(group.run([](const Rank&) {}), UsageError);
}

}  // namespace
}  // namespace ferry::test
