// 256 ranks on 32 simulated nodes. many_ranks_long_test.cpp has 1,024.
#include "collective/many_ranks.hpp"

namespace ferry::contract {
namespace {

constexpr Setup kCollective{BackendKind::collective, RankKind::engine_threads};

TEST(ManyRanks, TwoHundredFiftySixInOneHop) {
  run_many_ranks(kCollective, many_ranks_case(256), Hops::one);
}

TEST(ManyRanks, TwoHundredFiftySixInTwoHops) {
  run_many_ranks(kCollective, many_ranks_case(256), Hops::two);
}

TEST(ManyRanks, TwoHundredFiftySixOnSharedMemory) {
  run_many_ranks({BackendKind::cpu, RankKind::threads}, many_ranks_case(256), Hops::one);
}

TEST(ManyRanks, TwoHundredFiftySixInTwoHopsOnSharedMemory) {
  run_many_ranks({.rank_kind = RankKind::threads, .window = 16}, many_ranks_case(256), Hops::two);
}

// Sizes for 1,024 ranks. This machine need not have the memory.
TEST(ManyRanks, TheSizeQueryKnowsAThousand) {
  TestCase c = many_ranks_case(1024);
  const Topology topology(c.nodes);
  const auto sizes = [&](BackendKind backend, Hops hops, int max_tokens, int rank) {
    c.config.backend = backend;
    c.config.hops = hops;
    c.config.max_tokens = max_tokens;
    return size_of(c.config, topology, rank);
  };
  constexpr int kTokens = 4096;
  for (const int rank : {0, 127, 128, 1023}) {
    const Sizes one = sizes(BackendKind::collective, Hops::one, kTokens, rank),
                two = sizes(BackendKind::collective, Hops::two, kTokens, rank),
                shared = sizes(BackendKind::cpu, Hops::one, kTokens, rank),
                windows = sizes(BackendKind::cpu, Hops::two, kTokens, rank);
    // Hops change only how messages travel.
    for (const Sizes& other : {two, shared, windows}) {
      EXPECT_EQ(other.results, one.results);
      EXPECT_EQ(other.plans, one.plans);
    }
    // A relay also holds messages of 127 other nodes: those of one rank of each.
    const std::int64_t row = 16 * bytes_of(c.config.combine_type);
    EXPECT_GT(two.messages, one.messages + 127 * std::int64_t{kTokens} * row);
    // Staging for peers: for each token, or windows.
    EXPECT_GT(shared.dispatch_staging, 1024 * std::int64_t{kTokens} * row);
    EXPECT_LE(windows.dispatch_staging, std::int64_t{5} << 20);
    EXPECT_EQ(windows.dispatch_staging, sizes(BackendKind::cpu, Hops::two, 2, rank).dispatch_staging);
    EXPECT_EQ(windows.combine_staging, 0);
  }
}

}  // namespace
}  // namespace ferry::contract
