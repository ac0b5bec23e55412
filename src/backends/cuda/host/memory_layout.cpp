#include "backends/cuda/host/memory_layout.hpp"

#include <algorithm>

#include "backends/collective/message_hops.hpp"
#include "backends/cuda/device/routing_tables.hpp"
#include "backends/cuda/protocol/lane_view.hpp"
#include "base/text.hpp"
#include "exchange/backend.hpp"
#include "exchange/configuration.hpp"
#include "format/encoding.hpp"
#include "format/parts.hpp"
#include "layout/exchange_layout.hpp"

namespace ferry::cuda {

namespace {

// Places arrays one after the other, each aligned to 256 bytes.
class OffsetAllocator {
 public:
  std::int64_t take(std::int64_t bytes) {
    const std::int64_t begin = end_;
    end_ = align_up(begin + bytes, 256);
    return begin;
  }
  std::int64_t bytes() const { return end_; }

 private:
  std::int64_t end_ = 0;
};

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

void check_limits(const Config& config) {
  if (config.placement.ranks() > kMaxDeviceRanks) {
    throw UnsupportedError(str("kernels serve groups of up to ", counted(kMaxDeviceRanks, "rank"), ", got ",
                               config.placement.ranks(),
                               ": use smaller groups, or the backend collective on host memory"));
  }
  const int ranks = config.placement.ranks();
  if (config.transfer == Transfer::gather && takes_wide_kernels(ranks)) {
    throw UnsupportedError(str("kernels take transfer = gather in groups of up to ",
                               counted(kNarrowRanks, "rank"),
                               ranks > kNarrowRanks ? str(", got ", ranks) : ", and not with FERRY_WIDE=1",
                               ": use transfer = routed"));
  }
  const int shared = config.shared_experts;
  if (config.experts + shared > kMaxExperts) {
    throw UnsupportedError(str("the cuda backend supports up to ", counted(kMaxExperts, "expert"), ", got ",
                               config.experts,
                               shared > 0 ? str(" and ", counted(shared, "shared one")) : ""));
  }
  if (config.local_slots + shared > kMaxExperts) {
    throw UnsupportedError(str("the cuda backend supports up to ", counted(kMaxExperts, "group"),
                               ", got local_slots = ", config.local_slots,
                               shared > 0 ? str(" and ", counted(shared, "shared expert")) : "",
                               ": set fewer local_slots"));
  }
  const std::int64_t message = wire_bytes(parts_of(config.format, config.hidden));
  if (message > kMostMessageBytes) {
    throw UnsupportedError(str("the cuda backend supports up to ", counted(kMostMessageBytes, "byte"),
                               " a token, got ", message));
  }
  if (config.max_tokens > SlotMetadata::kMostTokens ||
      std::int64_t{config.max_tokens} * config.top_k > SlotMetadata::kMostOrdinals) {
    throw UnsupportedError(str("the cuda backend supports up to ",
                               counted(SlotMetadata::kMostTokens, "token"), " of ",
                               counted(SlotMetadata::kMostOrdinals, "route"),
                               ", got max_tokens = ", config.max_tokens, " with top_k = ", config.top_k));
  }
}

DeviceSignals device_signals(const Config& config) {
  return DeviceSignals::of({.ranks = config.placement.ranks(),
                            .experts = config.experts,
                            .max_tokens = config.max_tokens,
                            .top_k = config.top_k,
                            .combine_rows = exchange_shape(config, 0).combine_rows,
                            .sum_bytes = std::int64_t{config.hidden} * bytes_of(config.combine_type),
                            .most_ranks = plan_shape(config).most_ranks()});
}

DeviceLayout device_layout(const Config& config) {
  const PartList parts = parts_of(config.format, config.hidden);
  ExchangeShape shape = exchange_shape(config, device_signals(config).bytes);
  shape.message_bytes = device_message_layout(parts).bytes;
  shape.combine_row_bytes = align_up(shape.combine_row_bytes, kLine);
  DeviceLayout layout{exchange_layout(shape), 0, 0};
  if (!config.own_receive_buffers) return layout;
  // Parts are padded to 256 bytes. Scales are stored by rows first; tiles have memory of their own.
  std::int64_t rows = 0, tiles = 0;
  const PartLayout scales = largest_scale_tiles(config.hidden);
  for (int rank = 0; rank < config.placement.ranks(); ++rank) {
    rows = std::max(rows, receive_buffer_bytes(config, rank));
    tiles = std::max(tiles, part_bytes_total(scales, row_room(config, rank)));
  }
  layout.tiles = align_up(rows + kMaxParts * 256, 256);
  layout.received = align_up(layout.tiles + (encoding_of(config.format).scale_tiles ? tiles : 0),
                             ExchangeLayout::kSectionAlign);
  return layout;
}

ExchangeArrays exchange_arrays(const Config& config) {
  OffsetAllocator offsets;
  ExchangeArrays arrays;
  arrays.routing = offsets.take(RoutingTables::bytes(config.experts, config.placement.ranks()));
  arrays.epoch = offsets.take(sizeof(Epoch));
  arrays.timeout_claimed = offsets.take(sizeof(unsigned));
  arrays.bytes = offsets.bytes();
  return arrays;
}

std::vector<std::byte> routing_tables(const Config& config) {
  const int ranks = config.placement.ranks();
  std::vector<std::byte> memory(static_cast<std::size_t>(RoutingTables::bytes(config.experts, ranks)));
  const RoutingTables tables = RoutingTables::at(memory.data(), config.experts, ranks);
  int physical = 0;  // index, see RoutingTables
  for (int rank = 0; rank < ranks; ++rank) {
    tables.capacity[rank] = group_capacity(config, rank);
    tables.first_physical[rank] = physical;
    for (const int expert : config.placement.experts_of(rank)) {
      tables.physical_of[expert] = static_cast<std::uint16_t>(physical);
      tables.expert_of[physical] = static_cast<std::uint16_t>(expert);
      tables.rank_of[physical++] = static_cast<std::uint8_t>(rank);
    }
  }
  tables.first_physical[ranks] = physical;
  return memory;
}

LaneArrays lane_arrays(const Config& config, int rank) {
  const std::int64_t rows = row_capacity(config, rank), groups = groups_of(config, rank);
  const std::int64_t experts = config.experts;
  const bool rank_major = config.layout == Layout::rank_major;
  OffsetAllocator offsets;
  LaneArrays arrays;
  arrays.state = offsets.take(sizeof(LaneState));
  arrays.block_counts = offsets.take(8 * std::int64_t{kMaxSenders} * device_signals(config).count_words);
  arrays.block_counted = offsets.take(8 * std::int64_t{kMaxSenders});
  arrays.load = offsets.take(8 * experts * config.layers);
  arrays.symmetric =
      offsets.take(config.placement.ranks() > kNarrowRanks
                       ? static_cast<std::int64_t>(sizeof(std::byte*)) * config.placement.ranks()
                       : 0);
  arrays.joined = offsets.take(NumberCall::kMostResultBytes);
  arrays.plan = offsets.take(view_plan(nullptr, plan_shape(config)).bytes);
  arrays.weight = offsets.take(4 * rows * (rank_major ? config.top_k : 1));
  arrays.local_ids = offsets.take(rank_major ? 4 * rows * config.top_k : 0);
  arrays.dots = offsets.take(rank_major ? 0 : 4 * rows);
  arrays.group_expert = offsets.take(4 * groups);
  arrays.counts = offsets.take(4 * groups);
  arrays.row_offsets = offsets.take(4 * (groups + 1));
  arrays.tile_offsets = offsets.take(4 * (groups + 1));
  const bool has_scale_rows = encoding_of(config.format).scale_tiles && !config.own_receive_buffers;
  arrays.scale_rows = offsets.take(has_scale_rows ? rows * largest_scale_tiles(config.hidden).row_bytes : 0);
  arrays.input_scales = offsets.take(4 * (experts + config.shared_experts));
  arrays.shared_outputs = offsets.take(std::int64_t{config.shared_experts} * config.max_tokens *
                                       config.hidden * bytes_of(config.combine_type));
  arrays.bytes = offsets.bytes();
  return arrays;
}

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

}  // namespace ferry::cuda
