// The bytes of an all-to-all-v that is measured beside a call over an engine.
#include "tools/ferry/bench/engine_transfers.hpp"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace ferry::app {
namespace {

class EngineTransfers : public testing::Test {
 protected:
  EngineTransfers() {
    point_.trace = &trace_;
    point_.ranks = 4;
    point_.tokens = 9;
    point_.repetitions = 1;
    point_.config.experts = 8;
    point_.config.top_k = 3;
    point_.config.hidden = 16;
    point_.config.placement = Placement::blocks(8, 4);
    TraceOptions options;
    options.synth.experts = 8;
    options.synth.top_k = 3;
    options.synth.tokens = 36;
    trace_ = open_trace("synth:uniform", options);
  }

  // Ranks that a token of `source` reaches, itself among them.
  std::set<int> reached(const BenchInputs& inputs, int source, int token) const {
    std::set<int> ranks{source};
    for (int slot = 0; slot < 3; ++slot) ranks.insert(inputs.ids(1, source)[token * 3 + slot] / 2);
    return ranks;
  }

  Trace trace_;
  BenchPoint point_;
};

TEST_F(EngineTransfers, OneHopSendsAMessageForEachOtherRank) {
  const BenchInputs inputs(point_);
  const RankMatrix messages = messages_between(point_, inputs, 1, Topology::blocks(4, 1));
  for (int source = 0; source < 4; ++source) {
    std::vector<std::int64_t> expected(4);
    for (int token = 0; token < 9; ++token)
      for (const int rank : reached(inputs, source, token)) ++expected[static_cast<std::size_t>(rank)];
    expected[static_cast<std::size_t>(source)] = 0;
    EXPECT_EQ(messages[static_cast<std::size_t>(source)], expected);
  }
  const RankMatrix rows = rows_between(point_, inputs, 1, Topology::blocks(4, 1));
  for (std::size_t from = 0; from < 4; ++from)
    for (std::size_t to = 0; to < 4; ++to) EXPECT_EQ(rows[from][to], messages[to][from]);
}

TEST_F(EngineTransfers, TwoHopsSendAMessageForEachOtherNodeToItsRelay) {
  point_.config.hops = Hops::two;
  const BenchInputs inputs(point_);
  const Topology topology = Topology::blocks(4, 2);
  const RankMatrix messages = messages_between(point_, inputs, 1, topology);
  for (int source = 0; source < 4; ++source) {
    const int other = source < 2 ? 1 : 0;
    std::int64_t expected = 0;
    for (int token = 0; token < 9; ++token) {
      bool leaves = false;
      for (const int rank : reached(inputs, source, token)) leaves |= rank / 2 == other;
      expected += leaves ? 1 : 0;
    }
    const std::vector<std::int64_t>& sent = messages[static_cast<std::size_t>(source)];
    EXPECT_EQ(sent[static_cast<std::size_t>(topology.relay_of(source, other))], expected);
    EXPECT_EQ(sum_of(sent), expected);
  }
}

TEST_F(EngineTransfers, SumsAtTheSourceReturnARowForEachRemoteRoute) {
  point_.config.reduction = Reduction::exact;
  const BenchInputs inputs(point_);
  const RankMatrix rows = rows_between(point_, inputs, 1, Topology::blocks(4, 1));
  for (int source = 0; source < 4; ++source) {
    std::vector<std::int64_t> expected(4);
    for (int route = 0; route < 27; ++route)
      ++expected[static_cast<std::size_t>(inputs.ids(1, source)[route] / 2)];
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(rows[static_cast<std::size_t>(rank)][static_cast<std::size_t>(source)],
                rank == source ? 0 : expected[static_cast<std::size_t>(rank)]);
    }
  }
}

TEST_F(EngineTransfers, WhatARankSendsItsPeersReceive) {
  const RankMatrix messages{{0, 3, 1}, {2, 0, 0}, {0, 0, 0}};
  const std::vector<std::int64_t> bytes{400, 64, 0};
  std::vector<PeerBytes> of_ranks;
  for (int rank = 0; rank < 3; ++rank) of_ranks.push_back(transfer_of(messages, bytes, rank));
  EXPECT_EQ(of_ranks[0].send, (std::vector<std::int64_t>{0, 300, 100}));
  EXPECT_EQ(of_ranks[1].sent(), 64);
  EXPECT_EQ(of_ranks[0].received(), 64);
  for (std::size_t from = 0; from < 3; ++from)
    for (std::size_t to = 0; to < 3; ++to) EXPECT_EQ(of_ranks[from].send[to], of_ranks[to].receive[from]);
}

}  // namespace
}  // namespace ferry::app
