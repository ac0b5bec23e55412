// The transport policies, run on the host: messages through windows with credits, between ranks that are
// mapped, pretended to be remote, or reached over a network that delivers late and out of order.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include <gtest/gtest.h>

#include "backends/cuda/transport/message_check.cuh"
#include "kernels_on_host/lanes.hpp"
#include "kernels_on_host/network.hpp"
#include "seed.hpp"

namespace ferry::cuda {
namespace {

constexpr int kBytes = 1040;  // of a message: more than two granules
constexpr int kMessages = 23, kChannels = 2;
constexpr std::uint64_t kCall = 4;
constexpr unsigned kThreads = 64;

WaitTarget target(int peer) {
  return {Operation::dispatch, kCall, peer};
}

// All ranks exchange messages, twice on the same memory. `policy(rank)`: the transport of a rank.
template <class Policy>
void expect_exchanged(int ranks, int window, std::uint64_t seed, Network* network, Policy policy) {
  const MessageCheckLayout layout{ranks, kChannels, window, kBytes};
  // A message of these lanes is as large as all that the check needs.
  HostLanes lanes(ranks, 4, layout.total());
  unsigned long long wrong = 0;
  unsigned ended = 0;
  for (int round = 0; round < 2; ++round) {
    on_host::Grid grid(seed + static_cast<std::uint64_t>(round));
    const auto blocks = static_cast<unsigned>((2 * (ranks - 1) * kChannels * 32 + 63) / kThreads);
    unsigned running = static_cast<unsigned>(ranks) * blocks * kThreads;
    if (network != nullptr) network->attach(grid, running, true);
    for (int r = 0; r < ranks; ++r) {
      const MessageCheck check{.lane = lanes.view(r),
                               .layout = layout,
                               .messages = kMessages,
                               .first = static_cast<std::uint64_t>(round * kMessages),
                               .call = kCall + static_cast<std::uint64_t>(round),
                               .compare = true,
                               .wrong = &wrong,
                               .ended = &ended};
      grid.add(blocks, kThreads, [&, check, transport = policy(r)](unsigned block) {
        check_messages(check, transport, static_cast<int>((block * kThreads + threadIdx.x) / 32));
        --running;
      });
    }
    grid.run();
  }
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(ended, 0u);
}

// The ranks of other nodes, of two ranks each.
RankBits<kMaxDeviceRanks> other_nodes(int ranks, int rank) {
  RankBits<kMaxDeviceRanks> remote{};
  for (int r = 0; r < ranks; ++r) {
    if (r / 2 != rank / 2) remote.add(r);
  }
  return remote;
}

TEST(Transport, PlainStores) {
  for (const int window : {1, 7}) {
    expect_exchanged(3, window, test::seed(), nullptr, [](int) { return PlainStores{}; });
  }
}

TEST(Transport, PretendedNodes) {
  for (const int window : {1, 7}) {
    expect_exchanged(4, window, test::seed() + 1, nullptr,
                     [](int rank) { return Pretended{{}, other_nodes(4, rank)}; });
  }
}

TEST(Transport, ANetworkThatDeliversLateAndOutOfOrder) {
  for (const int window : {1, 7}) {
    Network network(test::seed() + 2);
    expect_exchanged(4, window, test::seed() + 3, &network,
                     [&](int rank) { return LatePuts{Pretended{{}, other_nodes(4, rank)}, &network}; });
  }
}

// [thread] of each warp waits for a count that comes, one whose sender finishes, and one that never comes.
TEST(Transport, WaitsEnd) {
  HostLanes lanes(2, 4, kBytes);
  LaneView late = lanes.view(0);
  late.deadline = 2'000'000;
  const Flag* flag = memory::dispatch_flags(late, 0, 0, 1, 0);
  Flag* end = memory::end_of_stream_flag(late, Payload::rows, 0, 0, 1);
  WaitResult came{}, finished{}, missed{};
  on_host::Grid grid(test::seed());
  grid.add(2, kThreads, [&](unsigned block) {
    if (block == 1) {
      PlainStores::signal(lanes.view(1), 0, memory::dispatch_flags(lanes.view(1), 1, 0, 1, 0), 9);
      PlainStores::signal(lanes.view(1), 0, memory::end_of_stream_flag(lanes.view(1), Payload::rows, 1, 0, 1),
                          kCall);
    } else if (threadIdx.x == 0) {
      came = PlainStores::wait(late, flag, 9, nullptr, target(1));
      finished = PlainStores::wait(late, flag, 10, end, target(1));
      missed = PlainStores::wait(late, flag, 10, nullptr, target(1));
    }
  });
  grid.run();
  EXPECT_EQ(came, WaitResult::ready);
  EXPECT_EQ(finished, WaitResult::end_of_data);
  EXPECT_EQ(missed, WaitResult::aborted);
  const std::optional<WaitRecord> record = timeout_of(*late.report, kFirstEpoch);
  ASSERT_TRUE(record);
  EXPECT_EQ(record->peer, 1);
  EXPECT_EQ(record->call, kCall);
}

TEST(RankBits, HoldRanksPast32) {
  RankBits<256> ranks{};
  EXPECT_FALSE(ranks.any());
  for (const int rank : {0, 31, 32, 63, 64, 255}) ranks.add(rank);
  EXPECT_EQ(ranks.count(), 6);
  for (int r = 0, below = 0; r < 256; ++r) {
    const bool member = r == 0 || r == 31 || r == 32 || r == 63 || r == 64 || r == 255;
    EXPECT_EQ(ranks.has(r), member) << r;
    EXPECT_EQ(ranks.count_below(r), below) << r;
    below += member;
  }
  RankBits<32> few{};
  few.add(31);
  EXPECT_EQ(few.word[0], 0x80000000u);
  EXPECT_EQ(few.count_below(31), 0);
}

}  // namespace
}  // namespace ferry::cuda
