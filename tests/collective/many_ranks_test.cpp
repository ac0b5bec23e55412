// A layer over hundreds of ranks on simulated nodes, each a thread: 256 ranks on 32 nodes, and compiled a
// second time with FERRY_TEST_LONG, 1,024 ranks on 128.
#include <fstream>
#include <string>
#include <vector>

#include "ferry/types.hpp"
#include "harness/harness.hpp"
#include "oracle/expected.hpp"

namespace ferry::contract {
namespace {

constexpr Setup kCollective{BackendKind::collective, RankKind::engine_threads};

// `ranks` ranks of two tokens each, dealt out to nodes of eight ranks in turn.
TestCase many_ranks_case(int ranks) {
  constexpr int kRanksOfNode = 8;
  constexpr int kExperts = 128;  // few: every pair of ranks exchanges the counts of all experts
  TestCase c;
  c.seed = seed_of(static_cast<std::uint64_t>(ranks));
  c.ranks = ranks;
  for (int rank = 0; rank < ranks; ++rank) c.nodes.push_back(rank % (ranks / kRanksOfNode));
  std::vector<ExpertLocation> locations;  // on every node
  for (int expert = 0; expert < kExperts; ++expert) locations.push_back({.rank = expert * 37 % ranks});
  c.config.placement = Placement::table(locations, ranks);
  c.config.experts = kExperts;
  c.config.top_k = 6;
  c.config.hidden = 16;
  c.config.max_tokens = 2;
  c.config.deadline = 300;  // the threads take turns on a few processors
  c.full = true;
  return c;
}

// Runs one dispatch and one combine with these hops; the oracle checks every byte, the counts of messages by
// hop, and the size query is compared with what each exchange maps.
void run_many_ranks(const Setup& setup, TestCase c, Hops hops) {
  setup.choose_backend(c.config);
  c.config.hops = hops;
  const PreparedStep prepared = prepare(c);
  const auto body = [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    require(exchange.config().hops == hops, "the exchange takes other hops");
    require_equal(exchange.sizes().total(), size_of(c.config, Topology(c.nodes), rank.index()).total(),
                  "bytes by the size query");
    dispatch_and_combine(exchange, c, prepared.step, prepared.expert_outputs);
    const oracle::Travel travel = travel_of(exchange);
    const oracle::RowPositions& positions = prepared.step.positions;
    const oracle::SentMessages sent = oracle::dispatch_messages(positions, travel, rank.index());
    const oracle::SentMessages returned =
        oracle::combine_messages(positions, travel, rank.index(), c.reduction);
    const WireCounts wire = exchange.wire_counts();
    const auto& far = wire.between_nodes;
    require_equal(wire.dispatch_messages, sent.all(), "dispatch messages");
    require_equal(wire.combine_messages, returned.all(), "combine messages");
    require_equal(far.dispatch_messages, sent.between_nodes, "dispatch messages between nodes");
    require_equal(far.combine_messages, returned.between_nodes, "combine messages between nodes");
  };
  run_ranks(setup, c.ranks, describe(c), body, c.nodes);
}

#ifdef FERRY_TEST_LONG

std::int64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string word; file >> word;) {
    std::int64_t kibibytes = 0;
    if (word == "MemAvailable:" && file >> kibibytes) return kibibytes * 1024;
  }
  return 0;
}

// Every rank holds a block of counts to and from every other rank, and a plan with the messages between all
// ranks: 17 MB, and so 17 GB in this process. Threads and what the test expects take the rest: 21.7 GB were
// seen in two hops.
void run_thousand(const Setup& setup, Hops hops) {
  TestCase c = many_ranks_case(1024);
  c.config.backend = setup.backend;
  c.config.hops = hops;
  constexpr std::int64_t kOfTheTest = std::int64_t{9} << 29;
  const std::int64_t needed = c.ranks * size_of(c.config, Topology(c.nodes)).total() + kOfTheTest;
  if (const std::int64_t available = available_memory(); available < needed)
    GTEST_SKIP() << "needs " << (needed >> 20) << " MiB of memory, and " << (available >> 20) << " are free";
  run_many_ranks(setup, c, hops);
}

TEST(ManyRanksLong, AThousandInOneHop) {
  run_thousand(kCollective, Hops::one);
}

TEST(ManyRanksLong, AThousandInTwoHops) {
  run_thousand(kCollective, Hops::two);
}

TEST(ManyRanksLong, AThousandOnSharedMemory) {
  run_thousand({BackendKind::cpu, RankKind::threads}, Hops::one);
}

#else

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

#endif

}  // namespace
}  // namespace ferry::contract
