#include "backends/cpu/gather.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "exchange/call_options.hpp"
#include "exchange/gather.hpp"
#include "group/fault_points.hpp"
#include "plan/shapes.hpp"

namespace ferry::cpu {
namespace {

// Sends this rank's terms to every rank. Returns those of all ranks.
std::vector<GatherTerms> exchange_terms(Lane& lane, Operation operation, const GatherTerms& mine,
                                        const CallOption& same_everywhere) {
  static_assert(sizeof(GatherTerms) <= 4 * kCallSummaryWords);
  lane.link->begin(operation, {&same_everywhere, 1});
  for (int peer = 0; peer < lane.context.ranks(); ++peer)
    std::memcpy(lane.link->summary_to(peer), &mine, sizeof mine);
  lane.link->post(false);
  lane.link->wait();
  std::vector<GatherTerms> all(static_cast<std::size_t>(lane.context.ranks()));
  for (int peer = 0; peer < lane.context.ranks(); ++peer)
    std::memcpy(&all[static_cast<std::size_t>(peer)], lane.link->summary_from(peer), sizeof(GatherTerms));
  return all;
}

struct Block {
  const std::byte* data;
  std::int64_t bytes;
};

// Sends a block to every rank, in rounds. `receive(begin, round_bytes)` reads the bytes [begin, begin +
// round_bytes) of each block for this rank from incoming(). `largest`: bytes of the largest block of any
// pair.
template <class Receive>
void send_in_rounds(Lane& lane, Operation operation, const std::vector<Block>& blocks, std::int64_t largest,
                    Receive receive) {
  const std::int64_t message_bytes = exchange_shape(lane.context.config, 0).message_bytes;
  const std::int64_t round_bytes = lane.context.config.max_tokens * message_bytes;
  for (std::int64_t begin = 0; begin < largest; begin += round_bytes) {
    lane.link->begin(operation, {});
    fault_point(FaultPoint::gather_begin, lane.context.me());
    if (lane.link->packs()) {
      std::vector<std::int64_t> reserved;
      for (const Block& block : blocks) {
        const std::int64_t bytes = bytes_in_round(block.bytes, begin, round_bytes);
        reserved.push_back((bytes + message_bytes - 1) / message_bytes * message_bytes);
      }
      lane.link->reserve(
          {.direction = Direction::to_experts, .message_bytes = message_bytes, .bytes = reserved});
    }
    for (int peer = 0; peer < lane.context.ranks(); ++peer) {
      const Block& block = blocks[static_cast<std::size_t>(peer)];
      const std::int64_t bytes = bytes_in_round(block.bytes, begin, round_bytes);
      if (bytes > 0) {
        lane.context.kernels.copy(lane.link->outgoing(Staging::dispatch, peer), block.data + begin, bytes,
                                  Store::cached);
      }
    }
    fault_point(FaultPoint::gather_sent, lane.context.me());
    lane.link->post(false);
    fault_point(FaultPoint::gather_posted, lane.context.me());
    lane.link->wait();
    fault_point(FaultPoint::gather_waited, lane.context.me());
    receive(begin, round_bytes);
  }
}

}  // namespace

std::int64_t all_gather_v(Lane& lane, const AllGatherCall& call) {
  const std::vector<GatherTerms> all = exchange_terms(
      lane, Operation::all_gather_v, {call.count, call.capacity, call.place}, {"row_bytes", call.row_bytes});
  check_all_gather(all, call.sub_group);
  const auto group = SubGroup::of(lane.context.me(), call.sub_group, lane.context.ranks());
  const auto* const rows = static_cast<const std::byte*>(call.rows);
  std::vector<Block> blocks(all.size(), Block{nullptr, 0});
  std::fill_n(blocks.begin() + static_cast<std::ptrdiff_t>(group.first), group.count,
              Block{rows, call.count * call.row_bytes});
  send_in_rounds(lane, Operation::all_gather_v, blocks, largest_count(all) * call.row_bytes,
                 [&](std::int64_t begin, std::int64_t round_bytes) {
                   auto* out = static_cast<std::byte*>(call.gathered);
                   for (std::size_t i = 0; i < group.count; ++i) {
                     const auto source = static_cast<int>(group.first + i);
                     const std::int64_t block_bytes = all[group.first + i].count * call.row_bytes;
                     const std::int64_t bytes = bytes_in_round(block_bytes, begin, round_bytes);
                     if (bytes > 0) {
                       lane.context.kernels.copy(out + begin, lane.link->incoming(Staging::dispatch, source),
                                                 bytes, Store::cached);
                     }
                     out += block_bytes;
                   }
                 });
  return sum_of_counts(group.terms(all));
}

void reduce_scatter_v(Lane& lane, const ReduceScatterCall& call) {
  const std::vector<GatherTerms> all =
      exchange_terms(lane, Operation::reduce_scatter_v, {call.count, call.total, call.place},
                     type_option("type", call.type));
  check_reduce_scatter(all, call.sub_group);
  const auto group = SubGroup::of(lane.context.me(), call.sub_group, lane.context.ranks());
  const std::int64_t value_bytes = bytes_of(call.type);
  const std::int64_t row_bytes = lane.context.config.hidden * value_bytes;
  const auto* rows = static_cast<const std::byte*>(call.rows);
  std::vector<Block> blocks;
  for (int peer = 0; peer < lane.context.ranks(); ++peer) {
    blocks.push_back({rows, group.holds(peer) ? all[static_cast<std::size_t>(peer)].count * row_bytes : 0});
    rows += blocks.back().bytes;
  }
  std::vector<const void*> addends(group.count);
  send_in_rounds(lane, Operation::reduce_scatter_v, blocks, largest_count(all) * row_bytes,
                 [&](std::int64_t begin, std::int64_t round_bytes) {
                   const std::int64_t bytes = bytes_in_round(call.count * row_bytes, begin, round_bytes);
                   if (bytes == 0) return;
                   for (std::size_t i = 0; i < group.count; ++i) {
                     addends[i] = lane.link->incoming(Staging::dispatch, static_cast<int>(group.first + i));
                   }
                   lane.context.kernels.weighted_sum({.out = static_cast<std::byte*>(call.sums) + begin,
                                                      .out_type = call.type,
                                                      .rows = addends.data(),
                                                      .row_type = call.type,
                                                      .combine_type = call.type,
                                                      .count = static_cast<int>(group.count),
                                                      .columns = bytes / value_bytes});
                 });
}

}  // namespace ferry::cpu
