// Calls of thousands of tokens, alternating with small ones on the same exchange: backends may divide the
// work of large calls differently.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "harness/harness.hpp"

namespace ferry::contract {
namespace {

constexpr int kMaxTokens = 2100;

// A case per step, with different numbers of tokens per rank: near powers of two, none, and max_tokens.
std::vector<TestCase> steps_of(const TestCase& c) {
  std::vector<TestCase> steps;
  Random random(c.seed);
  for (const std::vector<int>& from : std::vector<std::vector<int>>{
           {kMaxTokens}, {1024, 1025, 1023, 2048}, {3, kMaxTokens}, {0, 1500, 5}, {1}}) {
    TestCase one = c;
    for (int rank = 0; rank < c.ranks; ++rank)
      one.tokens.push_back(from[static_cast<std::size_t>(random.below(from.size()))]);
    steps.push_back(one);
  }
  return steps;
}

void run_steps(const Setup& setup, TestCase c) {
  c.config.hidden = 16;
  c.config.max_tokens = kMaxTokens;
  std::vector<PreparedStep> steps;
  for (const TestCase& one : steps_of(c)) steps.push_back(prepare(one, static_cast<int>(steps.size())));
  run_ranks(setup, c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    for (const PreparedStep& one : steps) dispatch_and_combine(exchange, one.c, one.step, one.expert_outputs);
  });
}

TEST_P(Contract, ThousandsOfTokensInEveryLayout) {
  for (const auto& [ranks, layout] : {std::pair{1, Layout::expert_major},
                                      {2, Layout::expert_padded},
                                      {3, Layout::rank_major},
                                      {8, Layout::expert_major}}) {
    TestCase c = small_case(static_cast<std::uint64_t>(ranks));
    c.ranks = ranks;
    c.config.layout = layout;
    c.config.experts = 3 * ranks + 1;
    c.config.top_k = 4;
    c.masked = 0.1;
    c.masked_tokens = 0.1;
    if (layout == Layout::rank_major) c.weights_from = WeightsFrom::none;
    run_steps(GetParam(), c);
  }
}

TEST_P(Contract, ThousandsOfTokensWithExactSumsAndBadIds) {
  for (const int ranks : {1, 4}) {
    TestCase c = small_case(static_cast<std::uint64_t>(ranks));
    c.ranks = ranks;
    c.config.experts = 64;
    c.config.top_k = 8;
    c.bad_ids = 0.05;
    c.reduction = c.config.reduction = Reduction::exact;
    c.row_values = true;
    run_steps(GetParam(), c);
  }
}

// The counts of all tokens decide which rows are dropped.
TEST_P(Contract, ThousandsOfTokensOverCapacity) {
  TestCase c = small_case(1);
  c.ranks = 3;
  c.config.experts = 7;
  c.config.top_k = 3;
  c.routing = Routing::skewed;
  c.config.capacity = 4000;
  run_steps(GetParam(), c);
}

TEST_P(Contract, ThousandsOfTokensInPhasesWithInt64Ids) {
  TestCase c = small_case(2);
  c.ranks = 4;
  c.config.experts = 32;
  c.config.top_k = 6;
  c.split_phases = true;
  c.ids = IdType::int64;
  run_steps(GetParam(), c);
}

}  // namespace
}  // namespace ferry::contract
