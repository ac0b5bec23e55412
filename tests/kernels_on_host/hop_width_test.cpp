// How many channels, threads and blocks the launches of two hops have.
#include <gtest/gtest.h>

#include <vector>

#include "backends/cuda/two_hops/hop_call.hpp"

namespace ferry::cuda {
namespace {

TEST(HopWidth, IsLargerWhereManyTokensArePut) {
  Config large;
  large.backend = BackendKind::nvshmem;
  large.hops = Hops::two;
  large.experts = 256;
  large.top_k = 8;
  large.max_tokens = 4096;
  large.hidden = 7168;
  const HopShape shape = hop_layout(large, Topology({0, 1}, true), 1024, 14'464).shape;
  EXPECT_EQ(shape.slots, 2);
  const auto expect = [&](BackendKind backend, int max_tokens, int threads, int channels) {
    Config config;
    config.backend = backend;
    config.max_tokens = max_tokens;
    const HopWidth width = HopWidth::of(config, shape);
    EXPECT_EQ(width.threads, threads) << max_tokens;
    EXPECT_EQ(width.channels, channels) << max_tokens;
  };
  expect(BackendKind::nvshmem, 4096, kManyHopThreads, 384);
  expect(BackendKind::nvshmem, 1023, kHopThreads, 192);
  expect(BackendKind::cuda, 4096, kHopThreads, 192);
}

TEST(HopWidth, ChannelsFitIntoEveryWindow) {
  for (const int ranks : {2, 3, 8, 32, 33, 256}) {
    std::vector<int> nodes;
    for (int rank = 0; rank < ranks; ++rank) nodes.push_back(ranks <= 3 ? rank : rank / 4);
    for (const BackendKind backend : {BackendKind::cuda, BackendKind::nvshmem}) {
      for (int window = 1; window <= 1200; ++window) {
        Config config;
        config.backend = backend;
        config.hops = Hops::two;
        config.experts = 256;
        config.top_k = 8;
        config.max_tokens = 4096;
        config.hidden = 64;
        config.window = window;
        const HopShape shape = hop_layout(config, Topology(nodes, true), 1024, 256).shape;
        const HopWidth width = HopWidth::of(config, shape);
        ASSERT_GE(shape.slots, 1) << ranks << " ranks, window " << window;
        ASSERT_GE(width.channels, 1) << ranks << " ranks, window " << window;
        ASSERT_LE(width.channels, shape.channels) << ranks << " ranks, window " << window;
        ASSERT_LE(shape.channels * shape.slots, window) << ranks << " ranks";
        ASSERT_GE(3 * shape.channels * shape.slots, 2 * window) << ranks << " ranks";
      }
    }
  }
}

TEST(HopBlocks, AreNoMoreThanTheTasksNeed) {
  HopArguments call{};
  call.wires.ranks = 2;
  call.threads = kManyHopThreads;
  call.channels = 384;
  call.content = HopContent::messages;
  EXPECT_EQ(hop_blocks(call, 0), 1);
  EXPECT_EQ(hop_blocks(call, 24), 24);
  EXPECT_EQ(hop_blocks(call, 132), 108);  // 9 tasks for each channel, 32 warps
  call.channels = 16;
  EXPECT_EQ(hop_blocks(call, 132), 5);
  call.content = HopContent::headers;
  EXPECT_EQ(hop_blocks(call, 132), 1);
}

}  // namespace
}  // namespace ferry::cuda
