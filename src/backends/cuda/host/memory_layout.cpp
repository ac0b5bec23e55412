#include "backends/cuda/host/memory_layout.hpp"

#include <algorithm>

#include "backends/cuda/device/routing_tables.hpp"
#include "backends/cuda/protocol/lane_view.hpp"
#include "base/text.hpp"
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
  arrays.load = offsets.take(8 * experts);
  arrays.symmetric =
      offsets.take(config.placement.ranks() > kNarrowRanks
                       ? static_cast<std::int64_t>(sizeof(std::byte*)) * config.placement.ranks()
                       : 0);
  arrays.metadata = offsets.take(sizeof(StepMetadata));
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

}  // namespace ferry::cuda
