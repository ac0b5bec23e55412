// The mode of a dispatch: the table of docs/kernels.md, row by row. Host code, so without a GPU.
#include "backends/cuda/dispatch/dispatch_mode.hpp"

#include <gtest/gtest.h>

#include "backends/cuda/dispatch/send_partition.hpp"

namespace ferry::cuda {
namespace {

// A fused call of few tokens from ids, with metadata blocks.
constexpr DispatchModeInput kFew{.phase = Phase::fused,
                                 .computes_values = false,
                                 .by_plan = false,
                                 .replicated = false,
                                 .to_every_rank = false,
                                 .has_metadata_blocks = true,
                                 .count_on_device = false,
                                 .tokens = kManyTokens - 1};

TEST(DispatchMode, FollowsTheNumberOfTokens) {
  DispatchModeInput input = kFew;
  EXPECT_EQ(dispatch_mode(input), DispatchMode::few_tokens);
  input.tokens = kManyTokens;
  EXPECT_EQ(dispatch_mode(input), DispatchMode::many_tokens);
}

TEST(DispatchMode, FewTokensNeedMetadataBlocks) {
  DispatchModeInput input = kFew;
  input.has_metadata_blocks = false;
  EXPECT_EQ(dispatch_mode(input), DispatchMode::many_tokens);
  input.count_on_device = true;
  EXPECT_EQ(dispatch_mode(input), DispatchMode::many_tokens);
}

TEST(DispatchMode, TheKernelChoosesWhereOnlyTheDeviceKnowsTheCount) {
  DispatchModeInput input = kFew;
  input.count_on_device = true;
  for (const std::int64_t bound : {kManyTokens - 1, kManyTokens}) {
    input.tokens = bound;
    EXPECT_EQ(dispatch_mode(input), DispatchMode::count_on_device);
  }
}

// A plan of replicated input has only the routes that the rank keeps.
TEST(DispatchMode, ReplicatedInputFromIdsNeedsTheGenericKernel) {
  DispatchModeInput input = kFew;
  input.replicated = true;
  EXPECT_EQ(dispatch_mode(input), DispatchMode::generic);
  input.by_plan = true;
  EXPECT_EQ(dispatch_mode(input), DispatchMode::by_plan);
}

TEST(DispatchMode, TokensForEveryRankHaveKernelsForFew) {
  DispatchModeInput input = kFew;
  input.to_every_rank = true;
  EXPECT_EQ(dispatch_mode(input), DispatchMode::few_tokens);
  input.count_on_device = true;
  EXPECT_EQ(dispatch_mode(input), DispatchMode::count_on_device);
  for (const auto change : {+[](DispatchModeInput& other) { other.tokens = kManyTokens; },
                            +[](DispatchModeInput& other) { other.has_metadata_blocks = false; },
                            +[](DispatchModeInput& other) { other.by_plan = true; }}) {
    DispatchModeInput changed = input;
    change(changed);
    EXPECT_EQ(dispatch_mode(changed), DispatchMode::generic);
  }
}

TEST(DispatchMode, PlansAndComputedValuesComeFirst) {
  DispatchModeInput input = kFew;
  input.count_on_device = true;
  input.by_plan = true;
  EXPECT_EQ(dispatch_mode(input), DispatchMode::by_plan);
  input.computes_values = true;
  EXPECT_EQ(dispatch_mode(input), DispatchMode::generic);
}

TEST(DispatchMode, PhasesMoveAnyNumberOfRowsAlike) {
  for (const Phase phase : {Phase::send, Phase::receive}) {
    DispatchModeInput common = kFew;
    common.phase = phase;
    EXPECT_EQ(dispatch_mode(common), DispatchMode::many_tokens);
    common.count_on_device = true;
    common.tokens = kManyTokens;
    EXPECT_EQ(dispatch_mode(common), DispatchMode::many_tokens);
    for (const auto change : {+[](DispatchModeInput& other) { other.computes_values = true; },
                              +[](DispatchModeInput& other) { other.by_plan = true; },
                              +[](DispatchModeInput& other) { other.replicated = true; },
                              +[](DispatchModeInput& other) { other.to_every_rank = true; }}) {
      DispatchModeInput changed = common;
      change(changed);
      EXPECT_EQ(dispatch_mode(changed), DispatchMode::generic);
    }
  }
}

}  // namespace
}  // namespace ferry::cuda
