// Transfers for tests of engines: what every rank sends follows from a seed, so that each rank can check what
// it receives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include "base/text.hpp"
#include "engine/engine.hpp"
#include "runtime/support.hpp"

namespace ferry::test {

// Bytes that each rank sends to each: sizes[from][to].
using TransferSizes = std::vector<std::vector<std::int64_t>>;

// Up to `most` bytes, in which many pairs send nothing.
inline TransferSizes random_sizes(int ranks, std::int64_t most, Random& random) {
  TransferSizes sizes(ranks, std::vector<std::int64_t>(ranks));
  for (int from = 0; from < ranks; ++from) {
    for (int to = 0; to < ranks; ++to) {
      if (from != to && below(random, 3) > 0) sizes[from][to] = below(random, static_cast<int>(most) + 1);
    }
  }
  return sizes;
}

inline std::byte transfer_byte(std::uint64_t seed, int from, int to, std::int64_t index) {
  const std::uint64_t mixed = (seed + 31 * static_cast<std::uint64_t>(from) +
                               17 * static_cast<std::uint64_t>(to) + static_cast<std::uint64_t>(index)) *
                              0x9E3779B97F4A7C15u;
  return static_cast<std::byte>(mixed >> 56);
}

// The memory and the lists of one rank's part of a transfer.
struct RankTransfer {
  RankTransfer(const TransferSizes& sizes, int rank) : index(rank) {
    const int ranks = static_cast<int>(sizes.size());
    for (int peer = 0; peer < ranks; ++peer) {
      send_bytes.push_back(sizes[rank][peer]);
      receive_bytes.push_back(sizes[peer][rank]);
      // Gaps, so that an offset that is taken for a sum of counts shows.
      send_offsets.push_back(peer * kGap +
                             std::accumulate(send_bytes.begin(), send_bytes.end() - 1, std::int64_t{0}));
      receive_offsets.push_back(
          peer * kGap + std::accumulate(receive_bytes.begin(), receive_bytes.end() - 1, std::int64_t{0}));
    }
    send.resize(static_cast<std::size_t>(send_offsets.back() + send_bytes.back() + kGap));
    receive.resize(static_cast<std::size_t>(receive_offsets.back() + receive_bytes.back() + kGap));
  }

  void fill(std::uint64_t seed) {
    for (int to = 0; to < static_cast<int>(send_bytes.size()); ++to) {
      for (std::int64_t i = 0; i < send_bytes[to]; ++i)
        send[send_offsets[to] + i] = transfer_byte(seed, index, to, i);
    }
  }

  void check(std::uint64_t seed) const {
    std::vector<std::byte> expected(receive.size());
    for (int from = 0; from < static_cast<int>(receive_bytes.size()); ++from) {
      for (std::int64_t i = 0; i < receive_bytes[from]; ++i)
        expected[receive_offsets[from] + i] = transfer_byte(seed, from, index, i);
    }
    FERRY_CHECK(receive == expected, str("rank ", index, " received other bytes than were sent"));
  }

  AllToAllV arguments() {
    return {send.data(), send_bytes, send_offsets, receive.data(), receive_bytes, receive_offsets};
  }

  static constexpr std::int64_t kGap = 3;
  int index;
  std::vector<std::int64_t> send_bytes, send_offsets, receive_bytes, receive_offsets;
  std::vector<std::byte> send, receive;
};

inline void no_check() {}

// One transfer of random sizes, the same on every rank for the same seed; checks every byte.
inline void exchange_random(Communicator& communicator, int rank, int ranks, std::int64_t most,
                            std::uint64_t seed_value) {
  Random random(seed_value);
  const auto transfer = std::make_shared<RankTransfer>(random_sizes(ranks, most, random), rank);
  transfer->fill(seed_value);
  communicator.all_to_all_v(transfer->arguments(), transfer, no_check);
  transfer->check(seed_value);
}

}  // namespace ferry::test
