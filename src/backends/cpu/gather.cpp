// all_gather_v and reduce_scatter_v: rows of all ranks without routing.
#include <vector>

#include "backends/cpu/small_calls.hpp"
#include "exchange/link_calls.hpp"
#include "plan/shapes.hpp"

namespace ferry::cpu {
namespace {

// Stores the bytes from `begin` on of this rank's blocks, up to `round_bytes` of each.
void stage_round(Lane& lane, const GatherRounds& rounds, std::int64_t begin, std::int64_t round_bytes) {
  const std::int64_t message_bytes = exchange_shape(lane.context.config, 0).message_bytes;
  if (lane.link->packs()) {
    std::vector<std::int64_t> reserved;
    for (const GatherRounds::Block& block : rounds.blocks()) {
      const std::int64_t bytes = bytes_in_round(block.bytes, begin, round_bytes);
      reserved.push_back((bytes + message_bytes - 1) / message_bytes * message_bytes);
    }
    lane.link->reserve(
        {.direction = Direction::to_experts, .message_bytes = message_bytes, .bytes = reserved});
  }
  for (int peer = 0; peer < lane.context.ranks(); ++peer) {
    const GatherRounds::Block& block = rounds.blocks()[static_cast<std::size_t>(peer)];
    const std::int64_t bytes = bytes_in_round(block.bytes, begin, round_bytes);
    if (bytes > 0) {
      lane.context.kernels.copy(lane.link->outgoing(Staging::dispatch, peer), block.data + begin, bytes,
                                Store::cached);
    }
  }
}

}  // namespace

SmallResult run(Lane& lane, const GatherCall& call) {
  const int me = lane.context.me();
  const std::int64_t round_bytes =
      lane.context.config.max_tokens * exchange_shape(lane.context.config, 0).message_bytes;
  const GatherRounds rounds = exchange_terms(*lane.link, call, lane.context.rank);
  for (std::int64_t begin = 0; begin < rounds.largest(); begin += round_bytes) {
    lane.link->begin(call.operation, {});
    fault_point(FaultPoint::gather_begin, me);
    stage_round(lane, rounds, begin, round_bytes);
    fault_point(FaultPoint::gather_sent, me);
    lane.link->post(false);
    fault_point(FaultPoint::gather_posted, me);
    lane.link->wait();
    fault_point(FaultPoint::gather_waited, me);
    rounds.receive(
        begin, round_bytes, [&](int source) { return lane.link->incoming(Staging::dispatch, source); },
        [&](std::byte* to, const std::byte* from, std::int64_t bytes) {
          lane.context.kernels.copy(to, from, bytes, Store::cached);
        },
        [&](const std::vector<const void*>& addends, std::byte* to, std::int64_t bytes) {
          lane.context.kernels.weighted_sum({.out = to,
                                             .out_type = call.type,
                                             .rows = addends.data(),
                                             .row_type = call.type,
                                             .combine_type = call.type,
                                             .count = static_cast<int>(addends.size()),
                                             .columns = bytes / bytes_of(call.type)});
        });
  }
  return {.gathered = rounds.gathered()};
}

}  // namespace ferry::cpu
