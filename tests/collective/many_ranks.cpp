#include "collective/many_ranks.hpp"

#include <vector>

#include "oracle/expected.hpp"

namespace ferry::contract {

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

}  // namespace ferry::contract
