// ferry_dispatch_layout() gives the counts of the C++ function.
#include <gtest/gtest.h>

#include <vector>

#include "capi/run.hpp"
#include "ferry/dispatch_layout.hpp"
#include "ferry/ferry.h"

namespace ferry::capi_test {
namespace {

constexpr int kTokens = 5, kTopK = 2, kExperts = 6, kRanks = 4, kNodes = 2;

struct Counts {
  std::vector<std::int32_t> per_rank = std::vector<std::int32_t>(kRanks, 7),
                            per_expert = std::vector<std::int32_t>(kExperts, 7),
                            per_node = std::vector<std::int32_t>(kNodes, 7);
  std::vector<std::uint8_t> in_rank = std::vector<std::uint8_t>(kTokens * kRanks, 7);

  friend bool operator==(const Counts&, const Counts&) = default;
};

TEST(DispatchLayout, TakesReplicasInBothInterfaces) {
  const std::vector<std::int32_t> ids = {0, 5, 3, 3, -1, 1, 9, 2, 4, 3};
  const std::vector<std::int32_t> held = {3, 0, 1, 3, 2, 3, 4, 5}, counts = {2, 2, 1, 3};
  const Placement placement = Placement::replicas({{3, 0}, {1, 3}, {2}, {3, 4, 5}}, kExperts);
  Counts c, cpp;
  c.per_expert.resize(8), cpp.per_expert.resize(8);
  auto args = sized<ferry_dispatch_layout_args>();
  args.ids = ids.data();
  args.id_type = FERRY_INT32;
  args.tokens = kTokens;
  args.top_k = kTopK;
  args.experts = kExperts;
  args.ranks = kRanks;
  args.held_experts = held.data();
  args.held_counts = counts.data();
  args.source = 2;
  args.tokens_per_rank = c.per_rank.data();
  args.routes_per_expert = c.per_expert.data();
  args.token_in_rank = c.in_rank.data();
  ASSERT_EQ(ferry_dispatch_layout(&args), FERRY_OK) << ferry_last_error();
  dispatch_layout({.ids = ids.data(), .tokens = kTokens, .top_k = kTopK, .placement = placement, .source = 2},
                  {.tokens_per_rank = cpp.per_rank.data(),
                   .routes_per_expert = cpp.per_expert.data(),
                   .token_in_rank = reinterpret_cast<bool*>(cpp.in_rank.data())});
  EXPECT_EQ(c, cpp);
  args.source = 4;
  EXPECT_TRUE(is_refused(ferry_dispatch_layout(&args), "source = 4, must be 0 to 3"));
}

TEST(DispatchLayout, IsTheSameInBothInterfaces) {
  const std::vector<std::int64_t> ids = {0, 5, 3, 3, -1, 1, 9, 2, 4, -1};
  const std::vector<std::int32_t> rank_of = {3, 2, 1, 0, 0, 1}, local = {0, 0, 0, 0, 1, 1};
  const std::vector<std::int32_t> node_of_rank = {7, 3, 7, 7}, pairs = {0, 0, 1, 1};
  for (const bool own_placement : {false, true}) {
    Counts c, cpp;
    auto args = sized<ferry_dispatch_layout_args>();
    args.ids = ids.data();
    args.id_type = FERRY_INT64;
    args.tokens = kTokens;
    args.top_k = kTopK;
    args.experts = kExperts;
    args.ranks = kRanks;
    if (own_placement) args.expert_rank = rank_of.data(), args.expert_local = local.data();
    args.tokens_per_rank = c.per_rank.data();
    args.routes_per_expert = c.per_expert.data();
    args.token_in_rank = c.in_rank.data();
    args.tokens_per_node = c.per_node.data();
    args.node_of_rank = (own_placement ? node_of_rank : pairs).data();
    ASSERT_EQ(ferry_dispatch_layout(&args), FERRY_OK) << ferry_last_error();

    const Topology nodes = own_placement ? Topology(node_of_rank) : Topology::blocks(kRanks, kNodes);
    std::vector<ExpertLocation> locations;
    for (int e = 0; e < kExperts; ++e) locations.push_back({rank_of[e], local[e]});
    const Placement placement =
        own_placement ? Placement::table(locations, kRanks) : Placement::blocks(kExperts, kRanks);
    dispatch_layout(
        {.ids = ids.data(), .tokens = kTokens, .top_k = kTopK, .placement = placement, .topology = &nodes},
        {.tokens_per_rank = cpp.per_rank.data(),
         .routes_per_expert = cpp.per_expert.data(),
         .token_in_rank = reinterpret_cast<bool*>(cpp.in_rank.data()),
         .tokens_per_node = cpp.per_node.data()});
    EXPECT_EQ(c, cpp);
    EXPECT_EQ(c.per_expert, (std::vector<std::int32_t>{1, 1, 1, 2, 1, 1}));

    args.memory = 3;
    EXPECT_TRUE(is_refused(ferry_dispatch_layout(&args), "FERRY_HOST_MEMORY (1) or FERRY_DEVICE_MEMORY (2)"));
    args.memory = FERRY_HOST_MEMORY;
    args.node_of_rank = nullptr;
    EXPECT_TRUE(is_refused(ferry_dispatch_layout(&args), "node_of_rank is NULL"));
    args.tokens_per_node = nullptr;
    args.tokens_per_rank = nullptr;
    EXPECT_TRUE(is_refused(ferry_dispatch_layout(&args), "tokens_per_rank is null"));
  }
}

}  // namespace
}  // namespace ferry::capi_test
