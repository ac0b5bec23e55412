#include "backends/cuda/engine/device_hops.hpp"

#include <algorithm>
#include <utility>

#include "backends/collective/message_rounds.hpp"
#include "backends/collective/second_hop.hpp"
#include "backends/cuda/runtime/current_device.hpp"
#include "backends/cuda/runtime/error.hpp"

namespace ferry::cuda {
using collective::FollowingMessages;

DeviceHops::DeviceHops(const ExchangeState& exchange, const Lane& lane, int index, Communicator& communicator)
    : DeviceMessages(exchange.rank.topology(), exchange.me(), exchange.config.window),
      exchange_(exchange),
      lane_(lane),
      communicator_(communicator),
      ranks_(exchange.rank.size()),
      node_(topology_.node_of(exchange.me())),
      layout_(*exchange.engine),
      memory_(exchange.engine_lane(index)),
      counts_(4 * std::int64_t{exchange.rank.size()}),
      first_outbox_(region(layout_.first_outbox)),
      first_inbox_(region(layout_.first_inbox)),
      second_outbox_(region(layout_.second_outbox)),
      second_inbox_(region(layout_.second_inbox)),
      second_headers_(tables().sent, tables().received),
      payloads_(at(topology_.nodes()), 0) {}

DeviceHops::Region DeviceHops::region(const LaneRegion& in) const {
  return {.data = memory_ + in.begin, .bytes = in.bytes, .more = {}};
}

// The first stop of messages to `final`.
int DeviceHops::first_stop(int final) const {
  if (same_node(me_, final)) return final;
  return kind_.rows ? topology_.relay_of(final, node_) : topology_.relay_of(me_, topology_.node_of(final));
}

// Whether `rank` is on another node and this rank is the relay between it and this node.
bool DeviceHops::relays_for(int rank) const {
  return !same_node(me_, rank) && topology_.relay_of(rank, node_) == me_;
}

std::byte* DeviceHops::room_in(Region& region, std::int64_t bytes) const {
  if (bytes <= region.bytes) return region.data;
  if (region.more.bytes() < bytes) region.more = TransferMemory(bytes, exchange_, communicator_);
  return region.more.data();
}

DeviceHops::Blocks DeviceHops::empty_blocks(std::byte* base) const {
  return {.base = base,
          .bytes = std::vector<std::int64_t>(at(ranks_), 0),
          .offsets = std::vector<std::int64_t>(at(ranks_), 0)};
}

// Places the blocks one after another. Their bytes are known.
void DeviceHops::place(Blocks& blocks, Region& region) const {
  std::int64_t end = 0;
  for (int rank = 0; rank < ranks_; ++rank) {
    blocks.offsets[at(rank)] = end;
    end += blocks.bytes[at(rank)];
  }
  blocks.base = room_in(region, end);
}

void DeviceHops::copy(void* to, const void* from, std::int64_t bytes) const {
  if (bytes == 0) return;
  check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice, stream_.get()),
        "copy messages of a relay");
}

void DeviceHops::reserve(Outgoing messages) {
  const ScopedDevice device(exchange_.device);
  DeviceMessages::reserve(std::move(messages));
  if (straight_) return;
  table_.assign(at(ranks_), 0);
  received_.assign(at(ranks_), 0);
  incoming_.assign(at(ranks_), nullptr);
  second_ = empty_blocks(nullptr);
  if (kind_.rows) {
    pack_rows();
  } else {
    write_bundles();
  }
  stream_.synchronize();
}

FollowingMessages DeviceHops::announce(int peer, std::int64_t* table) const {
  if (straight_) return DeviceMessages::announce(peer, table);
  if (!has_messages()) return {};
  std::int64_t most = 0;
  for (int rank = 0; rank < ranks_; ++rank) {
    if (rank != me_) most = std::max(most, first_.bytes[at(rank)]);
    table[rank] = first_stop(rank) == peer ? table_[at(rank)] : 0;
  }
  return collective::following_of(first_.bytes[at(peer)], most, sent_.message_bytes, window_);
}

void DeviceHops::transfer(const Blocks& sent, const Blocks& received, const Following& following,
                          const Wire& wire) const {
  collective::transfer_in_rounds({.send = sent.base,
                                  .send_bytes = sent.bytes,
                                  .send_offsets = sent.offsets,
                                  .receive = received.base,
                                  .receive_bytes = received.bytes,
                                  .receive_offsets = received.offsets,
                                  .device = true},
                                 me_, following, wire.transfer);
}

void DeviceHops::exchange(std::uint64_t call, const std::function<FollowingMessages(int peer)>& following,
                          const Tables& table, const Wire& wire) {
  if (straight_) return DeviceMessages::exchange(call, following, table, wire);
  const ScopedDevice device(exchange_.device);
  Following first;
  for (int peer = 0; peer < ranks_; ++peer) {
    first.push_back(following(peer));
    // In the first hop rows come only from ranks of this node, messages also from the ranks that this one
    // relays for.
    const bool sends = same_node(me_, peer) || (!kind_.rows && relays_for(peer));
    if (!sends && first.back().bytes != 0) wire.fail(collective::counts_fault(peer));
  }
  if (kind_.rows) {
    exchange_rows(call, first, table, wire);
  } else {
    exchange_messages(call, first, table, wire);
  }
}

// The tables of second_headers_ have been written.
void DeviceHops::second_hop(std::uint64_t call, const Wire& wire) {
  in_second_hop_ = true;
  const Following following = collective::exchange_second_headers(
      second_headers_, {call, me_, second_.bytes, sent_.message_bytes, window_}, wire);
  second_received_ = empty_blocks(nullptr);
  for (int peer = 0; peer < ranks_; ++peer)
    second_received_.bytes[at(peer)] = peer == me_ ? 0 : following[at(peer)].bytes;
  place(second_received_, second_inbox_);
  transfer(second_, second_received_, following, wire);
}

}  // namespace ferry::cuda
