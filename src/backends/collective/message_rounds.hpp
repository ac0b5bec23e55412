// The messages of one hop: an all_to_all_v of the whole group, in one or more rounds.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "backends/collective/pair_blocks.hpp"
#include "engine/engine.hpp"

namespace ferry::collective {

// What this rank sends to and receives from each rank. Lists are [R], in bytes; the entries of this rank do
// not travel.
struct HopMemory {
  const std::byte* send;
  std::vector<std::int64_t> send_bytes, send_offsets;
  std::byte* receive;
  std::vector<std::int64_t> receive_bytes, receive_offsets;
  bool device = false;
};

// What a rank announces of `bytes` that it sends to a rank. `most_bytes`: the most that it sends to any rank.
// `window`: messages in a round, 0: all.
FollowingMessages following_of(std::int64_t bytes, std::int64_t most_bytes, std::int64_t message_bytes,
                               int window);

// Collective. Calls `transfer` for each round. `following`: what every rank has announced, this one included.
void transfer_in_rounds(const HopMemory& hop, int me, const std::vector<FollowingMessages>& following,
                        const std::function<void(const AllToAllV&)>& transfer);

}  // namespace ferry::collective
