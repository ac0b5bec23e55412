// Streams that ranks of one process pass to the same call. Host code: needs no GPU.
#include "backends/cuda/host/lane_streams.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <vector>

namespace ferry::cuda {
namespace {

constexpr int kHandles[2] = {};
constexpr StreamIdentity kDefault{0, nullptr, true}, kBlocking{0, &kHandles[0], true},
    kNonBlocking{0, &kHandles[1], false};
constexpr int kExchanges[2] = {};

TEST(StreamRegistry, StreamsInOrderWithOneAnother) {
  EXPECT_TRUE(in_order(kDefault, kDefault));
  EXPECT_TRUE(in_order(kBlocking, kBlocking));
  EXPECT_TRUE(in_order(kNonBlocking, kNonBlocking));
  EXPECT_TRUE(in_order(kDefault, kBlocking));
  EXPECT_TRUE(in_order(kBlocking, kDefault));
  EXPECT_FALSE(in_order(kDefault, kNonBlocking));
  EXPECT_FALSE(in_order(kNonBlocking, kDefault));
  EXPECT_FALSE(in_order(kBlocking, kNonBlocking));
  StreamIdentity other = kDefault;
  other.device = 1;
  EXPECT_FALSE(in_order(kDefault, other));
}

TEST(StreamRegistry, FindsTheOtherRankOfTheSameCall) {
  StreamRegistry registry;
  EXPECT_EQ(registry.record(kExchanges, 0, 2, 1, kDefault), -1);
  EXPECT_EQ(registry.record(kExchanges, 0, 2, 1, kDefault), -1);  // the same rank
  EXPECT_EQ(registry.record(kExchanges, 0, 5, 1, kDefault), 2);
  EXPECT_EQ(registry.record(kExchanges, 0, 5, 1, kBlocking), 2);
  EXPECT_EQ(registry.record(kExchanges, 0, 5, 1, kNonBlocking), -1);
  EXPECT_EQ(registry.record(kExchanges, 0, 6, 1, kNonBlocking), 5);
}

// Only calls of the same number wait for each other.
TEST(StreamRegistry, OtherCallsLanesAndExchangesMayUseTheStream) {
  StreamRegistry registry;
  EXPECT_EQ(registry.record(kExchanges, 0, 0, 1, kDefault), -1);
  EXPECT_EQ(registry.record(kExchanges, 0, 1, 2, kDefault), -1);
  EXPECT_EQ(registry.record(kExchanges, 1, 1, 1, kDefault), -1);
  EXPECT_EQ(registry.record(kExchanges + 1, 0, 1, 1, kDefault), -1);
  EXPECT_EQ(registry.record(kExchanges, 0, 0, 2, kNonBlocking), -1);
  EXPECT_EQ(registry.record(kExchanges, 0, 0, 2, kDefault), 1);
}

TEST(StreamRegistry, ForgetsDestroyedExchanges) {
  StreamRegistry registry;
  EXPECT_EQ(registry.record(kExchanges, 0, 0, 1, kDefault), -1);
  EXPECT_EQ(registry.record(kExchanges, 1, 0, 1, kDefault), -1);
  registry.forget(kExchanges, 0);
  EXPECT_EQ(registry.record(kExchanges, 0, 1, 1, kDefault), -1);
  EXPECT_EQ(registry.record(kExchanges, 1, 1, 1, kDefault), -1);
}

TEST(StreamRegistry, OneOfManyThreadsGetsTheStream) {
  StreamRegistry registry;
  std::vector<int> found(8);
  for (std::uint64_t call = 1; call <= 50; ++call) {
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 8; ++rank)
      ranks.emplace_back([&, rank] { found[rank] = registry.record(kExchanges, 0, rank, call, kDefault); });
    for (std::thread& rank : ranks) rank.join();
    EXPECT_EQ(std::count(found.begin(), found.end(), -1), 1);
  }
}

}  // namespace
}  // namespace ferry::cuda
