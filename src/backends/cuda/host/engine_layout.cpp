#include "backends/cuda/host/engine_layout.hpp"

#include <algorithm>

#include "backends/collective/message_hops.hpp"
#include "backends/cuda/host/memory_layout.hpp"
#include "exchange/backend.hpp"
#include "exchange/configuration.hpp"
#include "layout/exchange_layout.hpp"

namespace ferry {
namespace cuda {
namespace {

constexpr std::int64_t kFlagBytes = 8 * kQuarters;

// Upper bounds for the hops of a call, of messages or of rows. With one hop, rows alone need an inbox.
struct HopBytes {
  std::int64_t first_inbox = 0, first_outbox = 0, second_outbox = 0, second_inbox = 0;
};

HopBytes hop_bytes(const Config& config, const ExchangeShape& shape, const Topology& topology, int rank,
                   const EngineLayout& layout) {
  HopBytes bytes{.first_inbox = layout.received_rows * layout.row_bytes};
  // Backends with kernels have windows for the data of hops.
  if (!has_relays(config, topology) || has_kernels(config.backend)) return bytes;
  const std::int64_t tokens = shape.max_tokens,
                     message = engine_message_bytes(shape.message_bytes, shape.top_k),
                     payload = align_up(shape.message_bytes, 16), entry = message - payload + 16;
  const int node = topology.node_of(rank);
  const auto ranks_of = [&](int of) { return static_cast<std::int64_t>(topology.ranks_of(of).size()); };
  std::int64_t relayed = 0;  // tokens of the ranks that this one relays for
  for (int other = 0; other < shape.ranks; ++other) {
    if (topology.node_of(other) != node && topology.relay_of(other, node) == rank) relayed += tokens;
  }
  for (int other = 0; other < topology.nodes(); ++other) {
    if (other != node) bytes.first_outbox += tokens * (payload + ranks_of(other) * entry);
  }
  bytes.first_inbox = relayed * (payload + ranks_of(node) * entry);
  bytes.second_outbox = relayed * ranks_of(node) * message;
  bytes.second_inbox = (shape.ranks - ranks_of(node)) * tokens * message;
  const bool partial = config.reduction == Reduction::partial;
  const std::int64_t rows =
      relayed * (partial ? std::min<std::int64_t>(config.top_k, ranks_of(node)) : config.top_k);
  bytes.first_outbox = std::max(bytes.first_outbox, layout.sent_rows * layout.row_bytes);
  bytes.first_inbox = std::max(bytes.first_inbox, (layout.received_rows + rows) * layout.row_bytes);
  bytes.second_outbox = std::max(bytes.second_outbox, rows * layout.row_bytes);
  bytes.second_inbox = std::max(bytes.second_inbox, layout.received_rows * layout.row_bytes);
  return bytes;
}

}  // namespace

std::int64_t engine_message_bytes(std::int64_t part_bytes, std::int32_t top_k) {
  const std::int64_t metadata = static_cast<std::int64_t>(sizeof(LLPacket)) * top_k;
  return align_up(part_bytes, 16) + metadata;
}

EngineLayout engine_layout(const Config& config, const Topology& topology, int rank) {
  const DeviceLayout device = device_layout(config);
  const ExchangeShape& shape = device.exchange.shape;
  const std::int64_t ranks = shape.ranks, messages = ranks * shape.max_tokens;
  EngineLayout layout{};
  layout.header_bytes = align_up(device_signals(config).header_bytes + 8 * kPayloads, kLine);
  layout.flags = layout.header_bytes +
                 align_up(shape.max_tokens * engine_message_bytes(shape.message_bytes, shape.top_k), kLine);
  layout.block_bytes = align_up(layout.flags + shape.max_tokens * kFlagBytes, kLine);
  layout.label_offset =
      static_cast<std::int32_t>(combine_row_layout(config.combine_type, config.hidden, config.top_k).bytes);
  layout.row_bytes = static_cast<std::int32_t>(labelled_row_bytes(layout.label_offset));
  const std::int64_t rows = row_capacity(config, rank);
  layout.sent_rows = config.reduction == Reduction::partial ? messages : std::max(messages, rows);
  layout.received_rows = shape.combine_rows;

  std::int64_t end = 0;
  const auto take = [&](std::int64_t bytes) {
    const std::int64_t begin = end;
    end = align_up(begin + bytes, 256);
    return begin;
  };
  layout.inbox = take(ranks * layout.block_bytes);
  layout.outbox = take(ranks * layout.block_bytes);
  const HopBytes hops = hop_bytes(config, shape, topology, rank, layout);
  const auto take_region = [&](std::int64_t bytes) {
    const std::int64_t all = bytes == 0 ? 0 : bytes + ranks * collective::kPairAlign;  // HopBlocks::place()
    return LaneRegion{take(all), all};
  };
  layout.first_inbox = take_region(hops.first_inbox);
  layout.row_inbox = layout.first_inbox.begin;
  layout.row_outbox = take(layout.sent_rows * layout.row_bytes);
  layout.first_outbox = take_region(hops.first_outbox);
  layout.second_outbox = take_region(hops.second_outbox);
  layout.second_inbox = take_region(hops.second_inbox);
  layout.signals_end = end;
  layout.first_row = take(4 * messages);
  layout.rows = take(4 * ranks);
  layout.arrived = take(static_cast<std::int64_t>(sizeof(LLPacket)) * layout.received_rows);
  layout.row_flags = take(kFlagBytes * layout.received_rows);
  layout.row_weights = take(4 * rows);
  layout.token_ranks = take(4 * std::int64_t{shape.max_tokens} * std::min<std::int64_t>(shape.top_k, ranks));
  layout.route_rank = take(4 * std::int64_t{shape.max_tokens} * shape.top_k);
  if (has_relays(config, topology)) {
    const auto node_ranks = static_cast<std::int64_t>(topology.ranks_of(topology.node_of(rank)).size());
    layout.payload_of = take(4 * messages);
    layout.row_of = take(4 * shape.max_tokens * node_ranks);
    layout.place_of = take(4 * std::int64_t{shape.max_tokens});
  }
  layout.received = take(device.received);
  layout.bytes = end;
  return layout;
}

void place_engine_messages(const EngineLayout& layout, std::int64_t part_bytes, LaneView* view) {
  const std::int64_t bytes = engine_message_bytes(part_bytes, view->top_k);
  view->signals.metadata = {layout.header_bytes + align_up(part_bytes, 16), 0, layout.block_bytes, bytes};
}

// Rank s stores for rank p at the address of p plus s blocks. So p's address is shifted to bring this rank's
// block to the p-th of the outbox.
void place_engine_lane(const EngineLayout& layout, std::byte* memory, LaneView* view,
                       std::span<std::byte*> symmetric) {
  for (int peer = 0; peer < view->ranks; ++peer)
    symmetric[static_cast<std::size_t>(peer)] =
        memory + layout.outbox + (peer - view->rank) * layout.block_bytes;
  symmetric[static_cast<std::size_t>(view->rank)] = memory + layout.inbox;
  DeviceSignals& signals = view->signals;
  signals.headers = {0, 0, layout.block_bytes, 0};
  for (int payload = 0; payload < kPayloads; ++payload)
    signals.end_of_stream[payload] = {signals.header_bytes + 8 * payload, 0, layout.block_bytes, 0};
  signals.flags = {layout.flags, 0, layout.block_bytes, kFlagBytes};
  signals.combine_begin = layout.row_flags - layout.inbox;
  signals.combine_rows = 0;  // both parities have the same flags
  // The view's messages_of() becomes header_bytes + source * block_bytes.
  view->exchange.signals = layout.header_bytes;
  view->exchange.dispatch = 0;
  view->exchange.source = layout.block_bytes;
  view->receive_buffers = layout.received - layout.inbox;
}

}  // namespace cuda
}  // namespace ferry
