// The launch between the phases of a call in two hops, run on the host: every block and thread of all ranks,
// with any nodes, windows and numbers of blocks.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include "kernels_on_host/hop_run.hpp"
#include "seed.hpp"

namespace ferry::cuda {
namespace {

const std::vector<std::vector<int>> kNodes = {
    {0, 1}, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1}, {0, 1, 1, 2, 2, 2, 2, 2}};

// Nodes of about the same size: ranks that follow one another, or scattered.
std::vector<int> many(int ranks, int nodes, bool scattered) {
  std::vector<int> labels;
  for (int rank = 0; rank < ranks; ++rank) labels.push_back(scattered ? rank % nodes : rank * nodes / ranks);
  return labels;
}

std::uint64_t seed_for(std::uint64_t number) {
  return test::seed() + number;
}

class Hops : public testing::TestWithParam<std::tuple<int, int, bool>> {
 protected:
  HopRun run() const {
    const auto [nodes, window, late] = GetParam();
    HopRun calls(seed_for(static_cast<std::uint64_t>(nodes * 100 + window)),
                 kNodes[static_cast<std::size_t>(nodes)], window, 4);
    if (late) calls.make_puts_late();
    return calls;
  }
};

TEST_P(Hops, MessagesArriveUnchanged) {
  HopRun calls = run();
  for (const bool by_plan : {false, true}) calls.messages(by_plan);
}

TEST_P(Hops, RowsReturnUnchanged) {
  HopRun calls = run();
  for (int call = 0; call < 2; ++call) calls.rows(false);
}

TEST_P(Hops, RelaysAddTheRowsOfTheirNode) {
  HopRun calls = run();
  calls.rows(true);
  calls.messages();
  calls.rows(true);
}

// A combine whose weights are sent first: both launches have one call number.
TEST_P(Hops, RowsFollowTheWeightsOfTheirCall) {
  HopRun calls = run();
  for (const bool adds : {false, true}) {
    calls.messages(true);
    calls.rows(adds, true);
    calls.rows(adds);
  }
}

INSTANTIATE_TEST_SUITE_P(Windows, Hops,
                         testing::Combine(testing::Range(0, static_cast<int>(kNodes.size())),
                                          testing::Values(1, 7, 64), testing::Bool()),
                         [](const auto& parameter) {
                           return "nodes" + std::to_string(std::get<0>(parameter.param)) + "_window" +
                                  std::to_string(std::get<1>(parameter.param)) +
                                  (std::get<2>(parameter.param) ? "_late" : "");
                         });

// More ranks than a warp has threads.
TEST(HopCalls, ManyRanksInSeveralNodes) {
  if (!kWide) GTEST_SKIP() << "of wide kernels";
  HopRun eight_nodes(seed_for(4), many(64, 8, false), 4, 1);
  eight_nodes.make_puts_late();
  eight_nodes.rows(true);
  HopRun scattered(seed_for(5), many(36, 3, true), 2, 1);
  scattered.messages(true);
  scattered.make_puts_late();
  scattered.rows(false);
  scattered.rows(true);
}

// A rank that is a relay for more ranks than a warp has threads.
TEST(HopCalls, OneRankRelaysForManyRanks) {
  if (!kWide) GTEST_SKIP() << "of wide kernels";
  std::vector<int> labels = many(34, 2, false);
  labels.push_back(2);
  HopRun calls(seed_for(6), labels, 1, 1);
  calls.messages();
  calls.rows(false);
  calls.rows(true);
}

TEST(HopCalls, RefusalsAndDifferencesEndTheCallOnEveryRank) {
  HopRun calls(seed_for(1), {0, 0, 1, 1}, 4, 2);
  calls.messages();
  calls.refused(2, false);
  calls.refused(1, true);
  calls.messages();
}

TEST(HopCalls, NoRowsFollowWeightsThatWereRefused) {
  HopRun calls(seed_for(7), {0, 0, 1, 1}, 4, 2);
  for (const bool differs : {false, true}) {
    calls.messages();
    calls.refused(2, differs);
    calls.continue_refused();
    calls.rows(true);
    calls.messages(true);
    calls.rows(false, true);
  }
}

TEST(HopCalls, ARankThatIsMissingIsNamed) {
  HopRun calls(seed_for(2), {0, 0, 1, 1}, 4, 2, 20'000'000);
  const auto records = calls.run_without(2);
  EXPECT_EQ(records.size(), 3u);
  for (const auto& [rank, record] : records) {
    EXPECT_EQ(record.rank, rank);
    EXPECT_EQ(record.peer, 2);
    EXPECT_EQ(record.operation, Operation::dispatch);
  }
}

// A rank whose header is missing may still wait for a relay in an earlier call. It must give up first.
TEST(HopCalls, HeadersAreAwaitedLongest) {
  EXPECT_EQ(relay_extra(1'000'000'000), 250'000'000u);
  EXPECT_EQ(header_deadline(1'000'000'000), 1'350'000'000u);
  EXPECT_EQ(relay_extra(30'000'000'000), 500'000'000u);
  EXPECT_EQ(header_deadline(30'000'000'000), 30'600'000'000u);
  for (const std::uint64_t never : {~0ull, ~0ull - 1}) EXPECT_EQ(header_deadline(never), ~0ull);
}

TEST(HopCalls, InOneHopMessagesPassNoRelay) {
  for (const std::vector<int>& nodes : kNodes) {
    for (const int window : {1, 7}) {
      HopRun calls(seed_for(static_cast<std::uint64_t>(window + 50)), nodes, window, 2);
      calls.send_straight();
      calls.make_puts_late();
      calls.messages();
      calls.rows(false);
      calls.messages(true);
    }
  }
}

// What a transport promises is needed: without it calls fail.
TEST(HopCalls, AMistakeOfTheTransportIsFound) {
  testing::TestPartResultArray failures;
  {
    const testing::ScopedFakeTestPartResultReporter reporter(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &failures);
    HopRun calls(seed_for(4), {0, 1}, 6, 1, 50'000'000);
    calls.make_puts_late(PutMistake::flag_before_put);
    for (int call = 0; call < 5; ++call) {
      calls.messages();
      calls.rows(false);
    }
    EXPECT_TRUE(calls.records().empty()) << "a wait has ended at its deadline";
  }
  EXPECT_GT(failures.size(), 0);
}

TEST(HopCalls, TheAbortOfTheHostEndsWaitsAndLeavesAnEmptyResult) {
  for (std::uint64_t seed = 60; seed < 66; ++seed) {
    HopRun calls(seed_for(seed), {0, 0, 1, 1}, 8, 4);
    calls.run_aborted(2);
  }
}

// Rank 2 is the relay of rank 0, and rank 0 of rank 2.
TEST(HopCalls, ARankThatStopsIsNamedWithTheRelay) {
  HopRun calls(seed_for(3), {0, 0, 1, 1}, 2, 2, 20'000'000);
  const auto records = calls.run_stopped(2);
  EXPECT_EQ(records.size(), 3u);
  // Rank 0 misses what rank 2 sends to its node, and rank 3 the room in the windows of rank 2. They give up
  // before rank 1, which waits for them, and their record is the group's. Here no host tells the others of
  // it.
  for (const int rank : {0, 3}) {
    ASSERT_TRUE(records.contains(rank));
    EXPECT_EQ(records.at(rank).peer, 2) << "rank " << rank;
    EXPECT_EQ(records.at(rank).via, -1) << "rank " << rank;
    EXPECT_NE(records.at(rank).role, WaitRole::none) << "rank " << rank;
  }
}

}  // namespace
}  // namespace ferry::cuda
