#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

#include "ferry/error.hpp"
#include "ferry/trace.hpp"
#include "trace/files.hpp"

namespace {

using namespace trace_test;
using ferry::Trace;
using ferry::TracePartition;

// ids[layer][token][slot] = number of the route, so that a partition shows which tokens it holds.
Trace numbered(int layers, std::int64_t tokens, int top_k) {
  Trace trace{.name = "numbered", .layers = layers, .tokens = tokens, .top_k = top_k};
  trace.experts = static_cast<int>(layers * tokens * top_k);
  for (int i = 0; i < trace.experts; ++i) {
    trace.ids.push_back(i);
    trace.weights.push_back(static_cast<float>(i) / 2);
  }
  return trace;
}

TEST(TracePartition, GivesRanksConsecutiveBlocksAndContinuesInTheNextStep) {
  const Trace trace = numbered(1, 12, 1);
  const auto ids = [&](int rank, std::int64_t step) {
    return ferry::partition(trace, {.rank = rank, .ranks = 2, .tokens_per_rank = 3, .step = step}).ids;
  };
  EXPECT_EQ(ids(0, 0), (std::vector<std::int32_t>{0, 1, 2}));
  EXPECT_EQ(ids(1, 0), (std::vector<std::int32_t>{3, 4, 5}));
  EXPECT_EQ(ids(0, 1), (std::vector<std::int32_t>{6, 7, 8}));
  EXPECT_EQ(ids(1, 1), (std::vector<std::int32_t>{9, 10, 11}));
  EXPECT_EQ(ids(0, 2), (std::vector<std::int32_t>{0, 1, 2}));
}

TEST(TracePartition, WrapsAroundMoreThanOnce) {
  const Trace trace = numbered(1, 3, 1);
  const TracePartition part = ferry::partition(trace, {.rank = 1, .ranks = 2, .tokens_per_rank = 7});
  EXPECT_EQ(part.first_token, 1);
  EXPECT_EQ(part.ids, (std::vector<std::int32_t>{1, 2, 0, 1, 2, 0, 1}));
}

TEST(TracePartition, EqualsTheSameComputedTokenByToken) {
  const Trace trace = numbered(3, 29, 4);
  for (const int ranks : {1, 2, 3, 8}) {
    for (const std::int64_t tokens : {0, 1, 5, 29, 40}) {
      for (std::int64_t step = 0; step < 5; ++step) {
        for (int rank = 0; rank < ranks; ++rank) {
          for (int layer = 0; layer < 3; ++layer) {
            const TracePartition part = ferry::partition(
                trace,
                {.layer = layer, .rank = rank, .ranks = ranks, .tokens_per_rank = tokens, .step = step});
            ASSERT_EQ(part.ids.size(), static_cast<std::size_t>(tokens * 4));
            ASSERT_EQ(part.weights.size(), part.ids.size());
            EXPECT_EQ(part.first_token, (step * ranks + rank) * tokens % 29);
            for (std::int64_t n = 0; n < tokens * 4; ++n) {
              const std::int64_t token = ((step * ranks + rank) * tokens + n / 4) % 29;
              const auto expected = static_cast<std::int32_t>((layer * 29 + token) * 4 + n % 4);
              ASSERT_EQ(part.ids[static_cast<std::size_t>(n)], expected);
              ASSERT_EQ(part.weights[static_cast<std::size_t>(n)], static_cast<float>(expected) / 2);
            }
          }
        }
      }
    }
  }
}

TEST(TracePartition, AcceptsTheLargestStep) {
  const Trace trace = numbered(1, 7, 1);
  const std::int64_t step = std::numeric_limits<std::int64_t>::max();  // a multiple of 7
  EXPECT_EQ(ferry::partition(trace, {.rank = 1, .ranks = 8, .tokens_per_rank = 3, .step = step}).first_token,
            3);
}

TEST(TracePartition, RefusesLayersRanksAndCountsOutOfRange) {
  const Trace trace = numbered(2, 7, 1);
  EXPECT_THROWS(ferry::partition(trace, {.layer = 2, .tokens_per_rank = 1}), ferry::UsageError,
                "layer 2 of 2");
  EXPECT_THROWS(ferry::partition(trace, {.rank = 2, .ranks = 2}), ferry::UsageError, "rank 2 of 2");
  EXPECT_THROWS(ferry::partition(trace, {.rank = -1, .ranks = 2}), ferry::UsageError, "rank -1 of 2");
  EXPECT_THROWS(ferry::partition(trace, {.rank = 0, .ranks = 0}), ferry::UsageError, "rank 0 of 0");
  EXPECT_THROWS(ferry::partition(trace, {.tokens_per_rank = -1}), ferry::UsageError, "found -1 tokens");
  EXPECT_THROWS(ferry::partition(trace, {.tokens_per_rank = 1ll << 62}), ferry::UsageError,
                "expected 0 to 2147483647");
  EXPECT_THROWS(ferry::partition(trace, {.tokens_per_rank = 1, .step = -1}), ferry::UsageError, "step -1");
  EXPECT_THROWS(ferry::partition(Trace{.layers = 1}, {.tokens_per_rank = 1}), ferry::UsageError, "no tokens");
}

}  // namespace
