// Two hops of the messages to the experts: senders write bundles, relays make the messages from them.
#include <algorithm>

#include "backends/cuda/engine/device_hops.hpp"
#include "group/fault_points.hpp"

namespace ferry::cuda {

// Messages within the node are sent from where they were stored.
void DeviceHops::write_bundles() {
  first_ = empty_blocks(memory_);
  const BundleSizes& sizes = kind_.sizes;
  auto* const payload_of = reinterpret_cast<std::int32_t*>(memory_ + layout_.payload_of);
  auto* const counts = reinterpret_cast<std::int32_t*>(counts_.data());
  const std::int32_t max_tokens = lane_.view().max_tokens;
  std::vector<NodeMessages> to(at(topology_.nodes()));
  for (int node = 0; node < topology_.nodes(); ++node) {
    for (const int rank : topology_.ranks_of(node)) {
      const std::int64_t bytes = sent_.bytes[at(rank)], offset = sent_.offsets[at(rank)];
      if (node == node_) {
        table_[at(rank)] = first_.bytes[at(rank)] = bytes;
        first_.offsets[at(rank)] = offset;
        continue;
      }
      NodeMessages& messages = to[at(node)];
      const auto count = static_cast<std::int32_t>(bytes / sent_.message_bytes);
      messages.rank[messages.ranks] = rank;
      messages.count[messages.ranks] = count;
      messages.messages[messages.ranks++] = sent_.send + offset;
      table_[at(rank)] = count * std::int64_t{sizes.entry()};
    }
    if (node == node_) continue;
    launch_number_payloads({.to = to[at(node)],
                            .sent_tokens = kind_.sent_tokens,
                            .max_tokens = max_tokens,
                            .payload_of = payload_of,
                            .payloads = counts + node},
                           stream_.get());
  }
  stream_.synchronize();
  std::int64_t end = layout_.first_outbox.begin;
  for (int node = 0; node < topology_.nodes(); ++node) {
    if (node == node_) continue;
    std::int64_t entries = 0;
    for (const int rank : topology_.ranks_of(node)) entries += table_[at(rank)];
    const int relay = topology_.relay_of(me_, node);
    payloads_[at(node)] = counts[node];
    first_.offsets[at(relay)] = end;
    first_.bytes[at(relay)] = entries + counts[node] * std::int64_t{sizes.payload};
    launch_write_bundle({.to = to[at(node)],
                         .sizes = sizes,
                         .max_tokens = max_tokens,
                         .payload_of = payload_of,
                         .bundle = memory_ + end,
                         .payloads = memory_ + end + entries},
                        stream_.get());
    end += first_.bytes[at(relay)];
  }
}

void DeviceHops::exchange_messages(std::uint64_t call, const Following& first, const Tables& table,
                                   const Wire& wire) {
  Blocks received = empty_blocks(memory_);
  std::int64_t end = layout_.first_inbox.begin;
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer == me_) continue;
    const std::int64_t bytes = received.bytes[at(peer)] = first[at(peer)].bytes;
    if (same_node(me_, peer)) {
      if (bytes > sent_.slot_bytes) wire.fail(collective::counts_fault(peer));
      received.offsets[at(peer)] = sent_.receive + peer * sent_.slot_bytes - memory_;
      received_[at(peer)] = bytes;
      incoming_[at(peer)] = received.block(peer);
      count(peer, first_.bytes[at(peer)] / sent_.message_bytes, first_.bytes[at(peer)]);
    } else {
      received.offsets[at(peer)] = end;
      end += bytes;
      if (end > layout_.first_inbox.begin + layout_.first_inbox.bytes)
        wire.fail(collective::counts_fault(peer));
    }
  }
  for (int node = 0; node < topology_.nodes(); ++node) {
    const int relay = topology_.relay_of(me_, node);
    if (node != node_) count(relay, payloads_[at(node)], first_.bytes[at(relay)]);
  }
  transfer(first_, received, first, wire);
  fault_point(FaultPoint::relay_holds, me_);
  open_bundles(received, table, wire);
  second_hop(call, wire);
  for (int relay = 0; relay < ranks_; ++relay) {
    if (relay == me_) continue;
    const auto* bytes = reinterpret_cast<const std::int64_t*>(second_headers_.content_from(relay));
    const std::byte* data = second_received_.block(relay);
    std::int64_t left = second_received_.bytes[at(relay)];
    for (int origin = 0; origin < ranks_; ++origin) {
      if (bytes[origin] == 0) continue;
      if (bytes[origin] < 0 || bytes[origin] > left) wire.fail(collective::counts_fault(relay));
      deliver(origin, data, bytes[origin], wire);
      data += bytes[origin];
      left -= bytes[origin];
    }
  }
  stream_.synchronize();
}

// Copies the messages of `rank` to where kernels read them.
void DeviceHops::deliver(int rank, const std::byte* data, std::int64_t bytes, const Wire& wire) {
  if (bytes > sent_.slot_bytes || same_node(me_, rank)) wire.fail(collective::counts_fault(rank));
  std::byte* const slot = sent_.receive + rank * sent_.slot_bytes;
  copy(slot, data, bytes);
  received_[at(rank)] = bytes;
  incoming_[at(rank)] = slot;
}

// Makes the messages for the ranks of this node: those for this rank in its inbox, the others in the second
// outbox.
void DeviceHops::open_bundles(const Blocks& received, const Tables& table, const Wire& wire) {
  const BundleSizes& sizes = kind_.sizes;
  const std::vector<int>& ranks = topology_.ranks_of(node_);
  std::vector<std::vector<std::int32_t>> counts(at(ranks_));  // [origin][rank of this node]
  for (int origin = 0; origin < ranks_; ++origin) {
    if (!relays_for(origin)) continue;
    std::int64_t entries = 0;
    for (const int rank : ranks) {
      const std::int64_t bytes = table(origin)[rank], count = bytes / sizes.entry();
      entries += bytes;
      if (count < 0 || bytes % sizes.entry() != 0 || count * sizes.message() > sent_.slot_bytes)
        wire.fail(collective::counts_fault(origin));
      counts[at(origin)].push_back(static_cast<std::int32_t>(count));
      if (rank != me_) second_.bytes[at(rank)] += count * sizes.message();
    }
    if (entries > received.bytes[at(origin)]) wire.fail(collective::counts_fault(origin));
  }
  place(second_, second_outbox_);
  std::vector<std::int64_t> next = second_.offsets;
  for (int rank = 0; rank < ranks_; ++rank)
    std::fill_n(reinterpret_cast<std::int64_t*>(second_headers_.content_to(rank)), ranks_, 0);
  for (int origin = 0; origin < ranks_; ++origin) {
    if (counts[at(origin)].empty()) continue;
    OpenBundleArguments open{.sizes = sizes,
                             .payloads = nullptr,
                             .payload_count = 0,
                             .ranks = static_cast<int>(ranks.size()),
                             .count = {},
                             .entries = {},
                             .messages = {}};
    const std::byte* entries = received.block(origin);
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const int rank = ranks[i];
      const std::int32_t messages = open.count[i] = counts[at(origin)][i];
      const std::int64_t bytes = messages * std::int64_t{sizes.message()};
      open.entries[i] = entries;
      entries += messages * std::int64_t{sizes.entry()};
      if (rank == me_) {
        open.messages[i] = sent_.receive + origin * sent_.slot_bytes;
        received_[at(origin)] = bytes;
        incoming_[at(origin)] = open.messages[i];
        continue;
      }
      open.messages[i] = second_.base + next[at(rank)];
      next[at(rank)] += bytes;
      reinterpret_cast<std::int64_t*>(second_headers_.content_to(rank))[origin] = bytes;
      count(rank, messages, bytes);
    }
    open.payloads = entries;
    if (sizes.payload > 0)
      open.payload_count = (received.bytes[at(origin)] - (entries - received.block(origin))) / sizes.payload;
    launch_open_bundle(open, stream_.get());
  }
  stream_.synchronize();
}

}  // namespace ferry::cuda
