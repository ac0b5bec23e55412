#include "backends/cuda/engine/device_relay.hpp"

#include <algorithm>
#include <utility>

#include "backends/cuda/runtime/scoped_device.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {
namespace {

using Part = collective::HopMemory::Part;

}  // namespace

void DeviceRelay::pack(const Kind& kind, collective::SentMessages* sent) {
  const ScopedDevice device(setup_.device);
  kind_ = kind;
  message_bytes_ = sent->message_bytes;
  most_bytes_ = sent->slot_bytes;
  sent->direction = kind.rows ? cpu::Direction::to_sources : cpu::Direction::to_experts;
  sent->shares = !kind.rows;
  sent->forwarder = kind.rows && !kind.adds ? nullptr : this;
  if (kind.rows) {
    pack_rows(sent);
  } else {
    pack_bundles(sent);
  }
  setup_.hops.finish();
}

// The rows for one stop are contiguous, in ascending order of their source ranks. Rows that this rank sends
// in the second hop are not moved.
void DeviceRelay::pack_rows(collective::SentMessages* sent) const {
  const int ranks = setup_.topology.ranks();
  const auto stop = [&](int final) {
    return collective::first_stop(setup_.topology, sent->direction, setup_.rank, final);
  };
  sent->first = collective::HopBlocks(ranks);
  for (int final = 0; final < ranks; ++final) {
    if (stop(final) != setup_.rank) sent->first.bytes[at(stop(final))] += sent->bytes[at(final)];
  }
  sent->first.place(setup_.hops, Part::first_outbox);
  std::vector<std::int64_t> next = sent->first.offsets;
  for (int final = 0; final < ranks; ++final) {
    if (stop(final) == setup_.rank) continue;
    std::int64_t& to = next[at(stop(final))];
    setup_.hops.copy(sent->first.base + to, sent->stored[at(final)], sent->bytes[at(final)]);
    to += sent->bytes[at(final)];
  }
}

// Messages within the node are sent from where they were stored.
void DeviceRelay::pack_bundles(collective::SentMessages* sent) {
  const Topology& topology = setup_.topology;
  const BundleSizes& sizes = kind_.sizes;
  std::vector<NodeMessages> to(at(topology.nodes()));
  sent->messages.assign(at(topology.ranks()), 0);
  for (int node = 0; node < topology.nodes(); ++node) {
    for (const int rank : topology.ranks_of(node)) {
      const std::int64_t messages = sent->bytes[at(rank)] / message_bytes_;
      if (node == node_) {
        sent->messages[at(rank)] = messages;
        continue;
      }
      NodeMessages& of_node = to[at(node)];
      of_node.rank[of_node.ranks] = rank;
      of_node.count[of_node.ranks] = static_cast<std::int32_t>(messages);
      of_node.messages[of_node.ranks++] = sent->stored[at(rank)];
      sent->bytes[at(rank)] = messages * sizes.entry();
      sent->first.bytes[at(rank)] = 0;
    }
    if (node == node_) continue;
    launch_number_payloads({.to = to[at(node)],
                            .sent_tokens = kind_.sent_tokens,
                            .max_tokens = setup_.max_tokens,
                            .payload_of = setup_.payload_of,
                            .payloads = setup_.counts + node},
                           setup_.stream);
  }
  setup_.hops.finish();
  std::byte* end = setup_.hops.room(Part::first_outbox, 0);
  for (int node = 0; node < topology.nodes(); ++node) {
    if (node == node_) continue;
    std::int64_t entries = 0;
    for (const int rank : topology.ranks_of(node)) entries += sent->bytes[at(rank)];
    const int relay = topology.relay_of(setup_.rank, node);
    sent->messages[at(relay)] = setup_.counts[node];
    sent->first.offsets[at(relay)] = end - sent->first.base;
    sent->first.bytes[at(relay)] = entries + setup_.counts[node] * std::int64_t{sizes.payload};
    launch_write_bundle({.to = to[at(node)],
                         .sizes = sizes,
                         .max_tokens = setup_.max_tokens,
                         .payload_of = setup_.payload_of,
                         .bundle = end,
                         .payloads = end + entries},
                        setup_.stream);
    end += sent->first.bytes[at(relay)];
  }
}

std::vector<cpu::ForwardedMessages> DeviceRelay::plan(std::span<const cpu::HeldMessages> held) {
  held_.assign(held.begin(), held.end());
  std::vector<cpu::ForwardedMessages> forwards;
  if (kind_.rows) {
    // write() finds out how many sums there are.
    std::vector<std::int64_t> rows(at(setup_.topology.ranks()), 0);
    for (const cpu::HeldMessages& each : held) rows[at(each.final)] += each.bytes / message_bytes_;
    for (int source = 0; source < setup_.topology.ranks(); ++source) {
      const std::int64_t most = std::min<std::int64_t>(rows[at(source)], setup_.max_tokens);
      if (most > 0) forwards.push_back({setup_.rank, source, most * message_bytes_, most});
    }
    return forwards;
  }
  for (const cpu::HeldMessages& each : held) {
    const std::int64_t messages = each.bytes / kind_.sizes.entry();
    if (each.bytes % kind_.sizes.entry() != 0 || messages * message_bytes_ > most_bytes_)
      throw UsageError(collective::counts_fault(each.origin));
    forwards.push_back({each.origin, each.final, messages * message_bytes_, messages});
  }
  return forwards;
}

void DeviceRelay::write(std::span<cpu::ForwardedMessages> forwards) {
  const ScopedDevice device(setup_.device);
  if (kind_.rows) {
    add_rows(forwards);
  } else {
    open_bundles(forwards);
  }
}

void DeviceRelay::add_rows(std::span<cpu::ForwardedMessages> forwards) const {
  for (const cpu::ForwardedMessages& sums : forwards) {
    std::vector<ArrivedRows> rows;  // of the ranks of this node, ascending
    for (const cpu::HeldMessages& each : held_) {
      if (each.final == sums.final) rows.push_back({each.data, each.bytes / message_bytes_});
    }
    setup_.add_rows(rows, sums.out, setup_.counts + sums.final);
  }
  setup_.hops.finish();
  for (cpu::ForwardedMessages& sums : forwards) {
    sums.messages = setup_.counts[sums.final];
    sums.bytes = sums.messages * message_bytes_;
  }
}

// A launch for each origin.
void DeviceRelay::open_bundles(std::span<const cpu::ForwardedMessages> forwards) const {
  for (auto held = held_.begin(); held != held_.end();) {
    const int origin = held->origin;
    OpenBundleArguments open{.sizes = kind_.sizes,
                             .payloads = held->shared.data(),
                             .payload_count = 0,
                             .ranks = 0,
                             .count = {},
                             .entries = {},
                             .messages = {}};
    if (kind_.sizes.payload > 0)
      open.payload_count = static_cast<std::int64_t>(held->shared.size()) / kind_.sizes.payload;
    for (; held != held_.end() && held->origin == origin; ++held) {
      const auto to =
          std::lower_bound(forwards.begin(), forwards.end(), std::pair(held->final, origin),
                           [](const cpu::ForwardedMessages& each, const std::pair<int, int>& key) {
                             return std::pair(each.final, each.origin) < key;
                           });
      open.count[open.ranks] = static_cast<std::int32_t>(to->messages);
      open.entries[open.ranks] = held->data;
      open.messages[open.ranks++] = to->out;
    }
    launch_open_bundle(open, setup_.stream);
  }
}

}  // namespace ferry::cuda
