#include "backends/collective/message_rounds.hpp"

#include <algorithm>
#include <limits>

namespace ferry::collective {
namespace {

// The bytes of one round, of `total` bytes in rounds of `per_round`.
std::int64_t bytes_in_round(std::int64_t total, std::int64_t per_round, std::int64_t round) {
  return round == 0 ? std::min(total, per_round)
                    : std::clamp<std::int64_t>(total - round * per_round, 0, per_round);
}

}  // namespace

FollowingMessages following_of(std::int64_t bytes, std::int64_t most_bytes, std::int64_t message_bytes,
                               int window) {
  const std::int64_t per_round =
      window > 0 ? window * message_bytes : std::numeric_limits<std::int64_t>::max();
  // Without a window all of it is one round.
  const std::int64_t rounds = most_bytes > per_round ? (most_bytes + per_round - 1) / per_round : 1;
  return {.bytes = bytes, .message_bytes = message_bytes, .round_bytes = per_round, .rounds = rounds};
}

void transfer_in_rounds(const HopMemory& hop, int me, const std::vector<FollowingMessages>& following,
                        const std::function<void(const AllToAllV&)>& transfer) {
  std::int64_t rounds = 1;
  for (const FollowingMessages& each : following) rounds = std::max(rounds, each.rounds);
  const std::size_t ranks = following.size(), mine = static_cast<std::size_t>(me);
  std::vector<std::int64_t> send_bytes(ranks), receive_bytes(ranks), send_offsets = hop.send_offsets,
                                                                     receive_offsets = hop.receive_offsets;
  for (std::int64_t round = 0; round < rounds; ++round) {
    for (std::size_t peer = 0; peer < ranks; ++peer) {
      if (round > 0) {
        send_offsets[peer] += send_bytes[peer];
        receive_offsets[peer] += receive_bytes[peer];
      }
      if (peer == mine) continue;
      send_bytes[peer] = bytes_in_round(hop.send_bytes[peer], following[mine].round_bytes, round);
      receive_bytes[peer] = bytes_in_round(hop.receive_bytes[peer], following[peer].round_bytes, round);
    }
    transfer({.send = hop.send,
              .send_bytes = send_bytes,
              .send_offsets = send_offsets,
              .receive = hop.receive,
              .receive_bytes = receive_bytes,
              .receive_offsets = receive_offsets,
              .device = hop.device});
  }
}

}  // namespace ferry::collective
