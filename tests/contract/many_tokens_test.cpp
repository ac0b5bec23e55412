// Calls of thousands of tokens, and of few on the same exchange: backends may share out the work of large
// calls in other ways.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "harness/harness.hpp"

namespace ferry::contract {
namespace {

constexpr int kMost = 2100;

// Tokens of every rank, by step: around powers of two, none, and all.
std::vector<Case> steps_of(const Case& c) {
  std::vector<Case> steps;
  Random random(c.seed);
  for (const std::vector<int>& from :
       std::vector<std::vector<int>>{{kMost}, {1024, 1025, 1023, 2048}, {3, kMost}, {0, 1500, 5}, {1}}) {
    Case one = c;
    for (int rank = 0; rank < c.ranks; ++rank)
      one.tokens.push_back(from[static_cast<std::size_t>(random.below(from.size()))]);
    steps.push_back(one);
  }
  return steps;
}

struct Played {
  Case c;
  Step step;
  oracle::Outcome outcome;
};

void play_many(const Setup& setup, Case c) {
  c.config.hidden = 16;
  c.config.max_tokens = kMost;
  std::vector<Played> steps;
  for (const Case& one : steps_of(c)) {
    Step step = make_step(one, static_cast<int>(steps.size()));
    oracle::Outcome outcome = make_outcome(one, step);
    steps.push_back({one, std::move(step), std::move(outcome)});
  }
  run_ranks(setup, c.ranks, describe(c), [&](Rank rank) {
    Exchange exchange(rank, c.config);
    for (const Played& one : steps) play_step(exchange, one.c, one.step, one.outcome);
  });
}

TEST_P(Contract, ThousandsOfTokensInEveryLayout) {
  for (const auto& [ranks, layout] : {std::pair{1, Layout::expert_major},
                                      {2, Layout::expert_padded},
                                      {3, Layout::rank_major},
                                      {8, Layout::expert_major}}) {
    Case c = small_case(static_cast<std::uint64_t>(ranks));
    c.ranks = ranks;
    c.config.layout = layout;
    c.config.experts = 3 * ranks + 1;
    c.config.top_k = 4;
    c.masked = 0.1;
    c.masked_tokens = 0.1;
    if (layout == Layout::rank_major) c.weights_from = WeightsFrom::nowhere;
    play_many(GetParam(), c);
  }
}

TEST_P(Contract, ThousandsOfTokensInExactSumsWithBadIds) {
  for (const int ranks : {1, 4}) {
    Case c = small_case(static_cast<std::uint64_t>(ranks));
    c.ranks = ranks;
    c.config.experts = 64;
    c.config.top_k = 8;
    c.bad_ids = 0.05;
    c.reduction = c.config.reduction = Reduction::exact;
    c.values = true;
    play_many(GetParam(), c);
  }
}

// What is dropped depends on the counts of all.
TEST_P(Contract, ThousandsOfTokensPastTheCapacity) {
  Case c = small_case(1);
  c.ranks = 3;
  c.config.experts = 7;
  c.config.top_k = 3;
  c.routing = Routing::skewed;
  c.config.capacity = 4000;
  play_many(GetParam(), c);
}

TEST_P(Contract, ThousandsOfTokensInHalvesWithWideIds) {
  Case c = small_case(2);
  c.ranks = 4;
  c.config.experts = 32;
  c.config.top_k = 6;
  c.split = true;
  c.ids = IdType::int64;
  play_many(GetParam(), c);
}

}  // namespace
}  // namespace ferry::contract
