// How many blocks of a launch take each role. Host code: needs no GPU.
#include "backends/cuda/host/block_roles.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <set>

#include "backends/cuda/protocol/lane_view.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {
namespace {

Config config_of(int ranks, int top_k, Layout layout) {
  Config config;
  config.experts = 256;
  config.top_k = top_k;
  config.placement = Placement::blocks(256, ranks);
  config.layout = layout;
  return config;
}

TEST(BlockRoles, EveryRoleHasABlock) {
  for (const int blocks : {2, 3, 16, 32, 132, 500}) {
    for (const int ranks : {1, 2, 4, 8, 32}) {
      for (const Layout layout : {Layout::expert_major, Layout::expert_padded, Layout::rank_major}) {
        Config config = config_of(ranks, ranks == 1 ? 1 : 8, layout);
        for (int bits = 0; bits < 16; ++bits) {
          config.input = (bits & 8) != 0 ? Input::replicated : Input::own;
          const int senders =
              dispatch_senders(blocks, config, {(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0});
          EXPECT_GE(senders, 1);
          EXPECT_LT(senders, blocks);
          EXPECT_LE(senders, kMaxSenders);
        }
        for (const Reduction reduction : {Reduction::partial, Reduction::exact, Reduction::unreduced}) {
          for (int bits = 0; bits < 4; ++bits) {
            const bool own_staged = (bits & 1) != 0;
            config.input = (bits & 2) != 0 ? Input::replicated : Input::own;
            for (const int shared_terms : {0, 4}) {
              const int senders = combine_senders(blocks, config, reduction, own_staged, shared_terms);
              EXPECT_GE(senders, 1);
              EXPECT_LT(senders, blocks);
            }
          }
        }
      }
    }
  }
}

// Small calls have senders, a coordinator and metadata blocks, and leave blocks for the other roles.
TEST(BlockRoles, SmallCallsHaveMetadataBlocks) {
  const Config config = config_of(4, 8, Layout::expert_major);
  for (const int blocks : {8, 16, 32, 132, 500}) {
    for (const int tokens : {0, 1, 28, 29, 128, 255}) {
      const auto [senders, metadata_blocks] =
          dispatch_few_token_blocks(blocks, config, tokens, tokens % 2 == 0);
      EXPECT_GE(metadata_blocks, 2);
      EXPECT_LE(metadata_blocks, 1 + std::max(blocks / 16, 1));
      EXPECT_GE(senders, 1);
      EXPECT_LT(senders + metadata_blocks, blocks);
    }
    // The number of tokens may be an upper bound of N: kManyTokens and more count as kManyTokens - 1.
    EXPECT_EQ(dispatch_few_token_blocks(blocks, config, 8192, false).metadata_blocks,
              dispatch_few_token_blocks(blocks, config, kManyTokens - 1, false).metadata_blocks);
  }
  EXPECT_EQ(dispatch_few_token_blocks(132, config, 28, false).metadata_blocks, 2);
  EXPECT_EQ(dispatch_few_token_blocks(132, config, 29, false).metadata_blocks, 3);
  EXPECT_EQ(dispatch_few_token_blocks(7, config, 1, false).metadata_blocks, 0);
  EXPECT_EQ(dispatch_few_token_blocks(132, config_of(32, 8, Layout::expert_major), 1, false).metadata_blocks,
            0);
}

// If warps send several whole rows each, no warp sends more than the minimum that is possible.
TEST(BlockRoles, SmallCallsSpreadTokensEvenly) {
  const Config config = config_of(4, 8, Layout::expert_major);
  // With nine blocks, two warps would have three of the 128 tokens each.
  EXPECT_EQ(dispatch_few_token_blocks(32, config, 128, false).senders, 10);
  for (int blocks = 8; blocks <= 132; ++blocks) {
    for (int tokens = 1; tokens < kManyTokens; ++tokens) {
      for (const bool quantised : {false, true}) {
        const auto [senders, metadata_blocks] = dispatch_few_token_blocks(blocks, config, tokens, quantised);
        ASSERT_GE(senders, 1);
        ASSERT_LT(senders + metadata_blocks, blocks) << tokens << " tokens, " << blocks << " blocks";
        const int warps = kWorkWarps * senders, most_per_warp = (tokens + warps - 1) / warps;
        if (most_per_warp < 2) continue;
        // With one block less, some warp would send more.
        ASSERT_GT(tokens, kWorkWarps * (senders - 1) * most_per_warp)
            << tokens << " tokens, " << blocks << " blocks";
      }
    }
  }
}

TEST(BlockRoles, OneBlockTakesBothRoles) {
  const Config config = config_of(4, 8, Layout::expert_major);
  EXPECT_EQ(dispatch_senders(1, config, {}), 1);
  EXPECT_EQ(combine_senders(1, config, Reduction::partial, false), 1);
}

// With more ranks, more rows of a token are sent to peers and fewer are copied on the receiving rank.
TEST(BlockRoles, SenderBlocksFollowTheWork) {
  const DispatchWork work{.few = false, .quantised = false, .direct_write = true};
  const Config two = config_of(2, 8, Layout::expert_major), eight = config_of(8, 8, Layout::expert_major);
  EXPECT_LT(dispatch_senders(32, two, work), dispatch_senders(32, eight, work));
  const Config summed = config_of(2, 8, Layout::rank_major);
  EXPECT_LT(dispatch_senders(32, two, work), dispatch_senders(32, summed, work));
  // Rows that are not written directly to their final position are copied from the staging buffer.
  const DispatchWork staged{.few = false, .quantised = false, .direct_write = false};
  EXPECT_LT(dispatch_senders(32, summed, staged), dispatch_senders(32, summed, work));
}

// The fastest choices on 4 x H200 (docs/log/2026-11-22-gpu.md).
TEST(BlockRoles, MatchTheMeasuredOptimum) {
  Config summed = config_of(4, 8, Layout::rank_major), rows = config_of(4, 8, Layout::expert_major);
  summed.max_tokens = rows.max_tokens = 4096;
  EXPECT_EQ(dispatch_senders(32, rows, {.few = false, .quantised = true, .direct_write = true}), 13);
  EXPECT_EQ(dispatch_senders(24, summed, {.few = false, .quantised = false, .direct_write = false}), 8);
  EXPECT_EQ(combine_senders(16, summed, Reduction::partial, false), 9);
  EXPECT_EQ(combine_senders(24, summed, Reduction::partial, false), 11);
  EXPECT_EQ(combine_senders(32, rows, Reduction::partial, false), 14);
  EXPECT_EQ(combine_senders(32, rows, Reduction::exact, false), 8);
  EXPECT_EQ(combine_senders(132, rows, Reduction::partial, false), 59);
  rows.max_tokens = 128;
  EXPECT_EQ(combine_senders(132, rows, Reduction::partial, false), 66);
}

TEST(BlockRoles, TheTableIsComplete) {
  std::set<std::string> names;
  for (const RoleCostEntry& entry : role_cost_table()) {
    EXPECT_TRUE(names.insert(entry.name).second) << entry.name;
    EXPECT_GT(entry.value, 0) << entry.name;
    EXPECT_NE(std::strstr(entry.bench, "--work "), nullptr) << entry.name;
    EXPECT_GT(std::strlen(entry.unit) * std::strlen(entry.measured), 0u) << entry.name;
    EXPECT_EQ(RoleCosts()[entry.cost], entry.value) << entry.name;
  }
}

TEST(BlockRoles, CostsCanBeOverridden) {
  const RoleCosts costs("encode=2.5,combine_link=0.25");
  EXPECT_EQ(costs[RoleCost::encode], 2.5);
  EXPECT_EQ(costs[RoleCost::combine_link], 0.25);
  EXPECT_EQ(costs[RoleCost::dispatch_plan], RoleCosts()[RoleCost::dispatch_plan]);
  const Config config = config_of(4, 8, Layout::expert_major);
  const DispatchWork work{.few = false, .quantised = true, .direct_write = true};
  EXPECT_LT(dispatch_senders(32, config, work), dispatch_senders(32, config, work, RoleCosts("encode=8")));
  EXPECT_LT(dispatch_senders(32, config, work, RoleCosts("encode=0.5")), dispatch_senders(32, config, work));
  for (const char* wrong : {"encode", "encode=", "encode=0", "encode=-1", "encode=nan", "encode=2x",
                            "speed=2", "=2", "encode=2;encode=3", ",encode=2"}) {
    EXPECT_THROW(RoleCosts{std::string(wrong)}, UsageError) << wrong;
  }
}

// A variable that a production rank inherits changes nothing.
TEST(BlockRoles, OnlyTestBuildsReadTheEnvironment) {
#if FERRY_TEST_HOOKS
  GTEST_SKIP() << "built with FERRY_TEST_HOOKS";
#else
  setenv("FERRY_BLOCK_ROLES", "encode=3", 1);
  EXPECT_EQ(role_costs()[RoleCost::encode], RoleCosts()[RoleCost::encode]);
  unsetenv("FERRY_BLOCK_ROLES");
#endif
}

}  // namespace
}  // namespace ferry::cuda
