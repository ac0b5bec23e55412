#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>

#include "ferry/error.hpp"
#include "ferry/trace.hpp"
#include "trace/files.hpp"

namespace {

using namespace trace_test;
using ferry::LoadStatistics;
using ferry::Trace;

TEST(LoadStatistics, OfEqualCounts) {
  const LoadStatistics s = ferry::load_statistics(std::vector<std::int64_t>(10, 7));
  for (const double figure : {s.max, s.p99, s.p90, s.p50, s.p10, s.min}) EXPECT_DOUBLE_EQ(figure, 1.0);
  EXPECT_NEAR(s.sigma_ln, 0, 1e-15);
  EXPECT_NEAR(s.gini, 0, 1e-15);
  EXPECT_EQ(s.routes, 70);
  EXPECT_EQ(s.idle, 0);
}

TEST(LoadStatistics, OfOneToOneHundredAndOneInAnyOrder) {
  std::vector<std::int64_t> counts;
  for (int i = 1; i <= 101; ++i) counts.push_back(i);  // mean 51
  std::shuffle(counts.begin(), counts.end(), std::mt19937_64(seed()));
  const LoadStatistics s = ferry::load_statistics(counts);
  EXPECT_DOUBLE_EQ(s.max, 101.0 / 51);
  EXPECT_DOUBLE_EQ(s.p99, 100.0 / 51);
  EXPECT_DOUBLE_EQ(s.p90, 91.0 / 51);
  EXPECT_DOUBLE_EQ(s.p50, 51.0 / 51);
  EXPECT_DOUBLE_EQ(s.p10, 11.0 / 51);
  EXPECT_DOUBLE_EQ(s.min, 1.0 / 51);
  EXPECT_NEAR(s.gini, (101.0 * 101 - 1) / (3.0 * 101 * 102) * 1.0, 1e-12);  // (n-1)/(3n) for 1..n
}

TEST(LoadStatistics, ExcludesIdleExpertsFromSigmaOnly) {
  const LoadStatistics s = ferry::load_statistics(std::vector<std::int64_t>{0, 1, 4, 0, 0});
  EXPECT_EQ(s.idle, 3);
  EXPECT_DOUBLE_EQ(s.max, 4.0);
  EXPECT_DOUBLE_EQ(s.min, 0.0);
  EXPECT_DOUBLE_EQ(s.p50, 0.0);
  EXPECT_NEAR(s.sigma_ln, std::log(2.0), 1e-12);  // of ln 1 and ln 4
  EXPECT_NEAR(s.gini, (2.0 * 1 + 4.0 * 4) / (5 * 5), 1e-12);
}

TEST(LoadStatistics, OfOneExpert) {
  const LoadStatistics s = ferry::load_statistics(std::vector<std::int64_t>{3});
  EXPECT_DOUBLE_EQ(s.p10, 1.0);
  EXPECT_DOUBLE_EQ(s.p99, 1.0);
}

TEST(LoadStatistics, RefusesCountsWithoutRoutes) {
  EXPECT_THROWS(ferry::load_statistics({}), ferry::UsageError, "none in 0 counts");
  EXPECT_THROWS(ferry::load_statistics(std::vector<std::int64_t>{0, 0}), ferry::UsageError,
                "none in 2 counts");
  EXPECT_THROWS(ferry::load_statistics(std::vector<std::int64_t>{4, -1}), ferry::UsageError, "found -1 at 1");
  EXPECT_THROWS(ferry::busiest(std::vector<std::int64_t>{0}), ferry::UsageError, "none in 1 counts");
  EXPECT_THROWS(ferry::median({}), ferry::UsageError, "found none");
}

TEST(LoadStatistics, MedianTakesEachFigureByItself) {
  const std::vector<LoadStatistics> odd = {
      {.max = 3, .min = 1}, {.max = 1, .min = 3}, {.max = 2, .min = 2.5}};
  EXPECT_DOUBLE_EQ(ferry::median(odd).max, 2);
  EXPECT_DOUBLE_EQ(ferry::median(odd).min, 2.5);
  EXPECT_DOUBLE_EQ(ferry::median(std::span(odd).first(2)).max, 2);
}

Trace tokens_of(int experts, int top_k, std::vector<std::int32_t> ids) {
  Trace trace{.name = "made", .layers = 1, .top_k = top_k, .experts = experts, .ids = std::move(ids)};
  trace.tokens = static_cast<std::int64_t>(trace.ids.size()) / top_k;
  trace.weights.resize(trace.ids.size());
  return trace;
}

TEST(TraceStatistics, CountsRoutesToExpertsAndRanks) {
  const Trace trace = tokens_of(4, 2, {0, 3, 3, 3, -1, 1});
  const auto counts = ferry::expert_counts(trace, 0);
  EXPECT_EQ(counts, (std::vector<std::int64_t>{1, 1, 0, 3}));
  const auto placement = ferry::Placement::blocks(4, 2);
  EXPECT_EQ(ferry::rank_counts(counts, placement), (std::vector<std::int64_t>{2, 3}));
  EXPECT_DOUBLE_EQ(ferry::busiest(counts), 3.0 / 1.25);
  EXPECT_DOUBLE_EQ(ferry::busiest(ferry::rank_counts(counts, placement)), 3.0 / 2.5);
  EXPECT_THROWS(ferry::rank_counts(counts, ferry::Placement::blocks(8, 2)), ferry::UsageError,
                "expected a placement of 4 experts, found one of 8");
  EXPECT_THROWS(ferry::distinct_ranks(trace, 0, ferry::Placement::blocks(8, 2)), ferry::UsageError,
                "found one of 8");
}

TEST(TraceStatistics, RoutesTakeTheReplicasOfAnExchange) {
  const std::uint64_t s = seed();
  SCOPED_TRACE("FERRY_SEED=" + std::to_string(s));
  std::mt19937_64 random(s);
  std::vector<std::int32_t> ids(101 * 4);
  for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random() % 5) - 1;
  const Trace trace = tokens_of(4, 4, ids);
  const auto placement = ferry::Placement::replicas({{0, 3, 1}, {1, 3}, {2, 3}}, 4);
  for (const std::int64_t tokens_per_rank : {0, 7}) {
    std::vector<std::int64_t> expected(3, 0);
    const std::int64_t block = tokens_per_rank == 0 ? 34 : tokens_per_rank;
    for (std::int64_t step = 0; step * 3 * block < 101; ++step) {
      for (int rank = 0; rank < 3; ++rank) {
        const std::int64_t first = (step * 3 + rank) * block;
        for (std::int64_t t = 0; t < std::min(block, 101 - first); ++t) {
          for (int slot = 0; slot < 4; ++slot) {
            const int id = ids[static_cast<std::size_t>((first + t) * 4 + slot)];
            if (id < 0) continue;
            const ferry::RouteOrigin origin{static_cast<int>(t), rank, slot};
            const auto replicas = placement.replicas_of(id);
            ++expected[static_cast<std::size_t>(replicas[ferry::hash32(origin) % replicas.size()].rank)];
          }
        }
      }
    }
    EXPECT_EQ(ferry::rank_counts(trace, 0, placement, tokens_per_rank), expected);
  }
  EXPECT_EQ(ferry::rank_counts(trace, 0, ferry::Placement::blocks(4, 2)),
            ferry::rank_counts(ferry::expert_counts(trace, 0), ferry::Placement::blocks(4, 2)));
  EXPECT_THROWS(ferry::rank_counts(ferry::expert_counts(trace, 0), placement), ferry::UsageError,
                "pass the trace");
  EXPECT_THROWS(ferry::rank_counts(trace, 0, placement, -1), ferry::UsageError, "tokens_per_rank = -1");
}

TEST(TraceStatistics, AdjacentOverlapStaysInsideSequences) {
  Trace trace = tokens_of(8, 2, {0, 1, 1, 0, 0, 2, 5, 6, 6, -1, -1, 7});
  // Experts shared by adjacent tokens: 2, 1, 0, 1, 0. Masked slots do not count.
  EXPECT_DOUBLE_EQ(ferry::adjacent_overlap(trace, 0), 4.0 / 5);
  trace.sequence_lengths = {1, 0, 2, 3};  // without the pairs (0,1) and (2,3)
  EXPECT_DOUBLE_EQ(ferry::adjacent_overlap(trace, 0), 2.0 / 3);
  EXPECT_DOUBLE_EQ(ferry::adjacent_overlap(tokens_of(8, 2, {0, 1}), 0), 0.0);
  EXPECT_DOUBLE_EQ(ferry::adjacent_overlap(tokens_of(8, 3, {1, 1, 2, 1, 1, 1}), 0), 1.0);
}

TEST(TraceStatistics, DistinctRanksEqualsTheSizeOfSets) {
  const std::uint64_t s = seed();
  SCOPED_TRACE("FERRY_SEED=" + std::to_string(s));
  std::mt19937_64 random(s);
  for (const int ranks : {1, 3, 8, 20}) {
    const auto placement = ferry::Placement::blocks(20, ranks);
    std::vector<std::int32_t> ids(300 * 5);
    for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random() % 21) - 1;
    const Trace trace = tokens_of(20, 5, ids);
    std::size_t distinct = 0;
    for (std::size_t token = 0; token < 300; ++token) {
      std::set<int> reached;
      for (std::size_t slot = 0; slot < 5; ++slot) {
        if (ids[token * 5 + slot] >= 0) reached.insert(placement.location(ids[token * 5 + slot]).rank);
      }
      distinct += reached.size();
    }
    EXPECT_DOUBLE_EQ(ferry::distinct_ranks(trace, 0, placement), static_cast<double>(distinct) / 300);
  }
}

}  // namespace
