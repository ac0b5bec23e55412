// The transport policies, run on the host: messages through windows with credits, between ranks that are
// mapped, pretended to be remote, or reached over a network that delivers late and out of order.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include <gtest/gtest.h>

#include "backends/cuda/transport/transport.cuh"
#include "kernels_on_host/lanes.hpp"
#include "kernels_on_host/network.hpp"
#include "seed.hpp"

namespace ferry::cuda {
namespace {

constexpr int kBytes = 1040;  // of a message: more than two granules
constexpr int kMessages = 23;
constexpr std::uint64_t kCall = 4;
constexpr unsigned kThreads = 32;

using Words = std::uint64_t[kBytes / 8];

std::uint64_t word_of(int from, int to, int message, int at) {
  return static_cast<std::uint64_t>(((from * 64 + to) * 64 + message) * 4096 + at);
}

// Where things lie in this test. A pair's messages go through `window` places at the receiver; in a place of
// send staging the sender composes the message for the same place.
struct Pair {
  const LaneView& lane;
  int window;

  std::byte* place(int source, int message) const {
    return lane.message(lane.rank, 0, source, message % window, kBytes);
  }
  std::byte* staging(int peer, int message) const {
    return lane.message(lane.rank, 1, peer, message % window, kBytes);
  }
  Flag* flag(int source, int message) const {
    return lane.dispatch_flags(lane.rank, 0, source, message % window);
  }
  // How many messages `peer` has read, which this rank has sent it.
  Flag* credit(int peer) const { return lane.end_of_stream_flag(Payload::weights, lane.rank, 0, peer); }
};

WaitTarget target(int peer) {
  return {Operation::dispatch, kCall, peer};
}

// [warp] Block 2 * peer sends to that peer, block 2 * peer + 1 receives from it.
template <class Transport>
void exchange(const LaneView& lane, const Transport& transport, int window, unsigned block, int* wrong) {
  const int peer = static_cast<int>(block / 2);
  const Pair pair{lane, window};
  const unsigned thread = threadIdx.x;
  if (peer == lane.rank) return;
  for (int m = 0; m < kMessages; ++m) {
    const auto number = static_cast<std::uint64_t>(m) + 1;
    if (block % 2 == 0) {
      // The place is free once the message before in it has been read.
      const std::uint64_t read = m < window ? 0 : number - static_cast<std::uint64_t>(window);
      if (transport.wait(lane, pair.credit(peer), read, nullptr, target(peer)) != WaitResult::ready) {
        ++*wrong;
        return;
      }
      const bool staged = transport.is_staged(peer);
      // Both ranks name the place by its address in their own memory: it is the sender's at the receiver.
      std::byte* there = pair.place(lane.rank, m);
      std::byte* composed = staged ? pair.staging(peer, m) : transport.at(lane, peer, there);
      auto& words = *reinterpret_cast<Words*>(composed);
      for (int at = static_cast<int>(thread); at < kBytes / 8; at += kThreads)
        words[at] = word_of(lane.rank, peer, m, at);
      Flag* flag = pair.flag(lane.rank, m);
      if (staged) {
        transport.put_with_signal(lane, peer, there, composed, kBytes, flag, number);
      } else {
        transport.signal(lane, peer, flag, number);
      }
    } else {
      if (transport.wait(lane, pair.flag(peer, m), number, nullptr, target(peer)) != WaitResult::ready) {
        ++*wrong;
        return;
      }
      const auto& words = *reinterpret_cast<const Words*>(pair.place(peer, m));
      for (int at = static_cast<int>(thread); at < kBytes / 8; at += kThreads)
        *wrong += words[at] != word_of(peer, lane.rank, m, at);
      transport.signal(lane, peer, pair.credit(lane.rank), number);
    }
  }
}

// All ranks exchange their messages. `policy(rank)`: the transport of a rank.
template <class Policy>
void expect_exchanged(int ranks, int window, std::uint64_t seed, Network* network, Policy policy) {
  HostLanes lanes(ranks, std::max(window, 4), kBytes);
  on_host::Grid grid(seed);
  int wrong = 0;
  unsigned running = static_cast<unsigned>(2 * ranks * ranks) * kThreads;
  if (network != nullptr) network->attach(grid, running);
  for (int r = 0; r < ranks; ++r) {
    grid.add(static_cast<unsigned>(2 * ranks), kThreads, [&, r, transport = policy(r)](unsigned block) {
      exchange(lanes.view(r), transport, window, block, &wrong);
      --running;
    });
  }
  grid.run();
  EXPECT_EQ(wrong, 0);
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
  const Pair pair{late, 1};
  Flag* end = late.end_of_stream_flag(Payload::rows, 0, 0, 1);
  WaitResult came{}, finished{}, missed{};
  on_host::Grid grid(test::seed());
  grid.add(2, kThreads, [&](unsigned block) {
    if (block == 1) {
      PlainStores::signal(lanes.view(1), 0, lanes.view(1).dispatch_flags(1, 0, 1, 0), 9);
      PlainStores::signal(lanes.view(1), 0, lanes.view(1).end_of_stream_flag(Payload::rows, 1, 0, 1), kCall);
    } else if (threadIdx.x == 0) {
      came = PlainStores::wait(late, pair.flag(1, 0), 9, nullptr, target(1));
      finished = PlainStores::wait(late, pair.flag(1, 0), 10, end, target(1));
      missed = PlainStores::wait(late, pair.flag(1, 0), 10, nullptr, target(1));
    }
  });
  grid.run();
  EXPECT_EQ(came, WaitResult::ready);
  EXPECT_EQ(finished, WaitResult::end_of_data);
  EXPECT_EQ(missed, WaitResult::aborted);
  const std::optional<WaitRecord> record = timeout_of(*late.report);
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
