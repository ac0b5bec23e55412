#include "backends/cpu/lane.hpp"

#include <algorithm>
#include <utility>

#include "format/encoding.hpp"
#include "plan/shapes.hpp"

namespace ferry::cpu {

LocalArrays local_arrays(const Config& config, int rank) {
  LocalArrays arrays;
  auto take = [&](std::int64_t bytes) {
    const std::int64_t begin = arrays.bytes;
    arrays.bytes = align_up(begin + bytes, 64);
    return begin;
  };
  const std::int64_t rows = row_capacity(config, rank), groups = groups_of(config, rank);
  const bool rank_major = config.layout == Layout::rank_major;
  const bool indexed = config.layout == Layout::expert_indexed;
  arrays.plan_bytes = view_plan(nullptr, plan_shape(config)).bytes;
  arrays.plan = take(arrays.plan_bytes);
  arrays.weight = take(4 * rows * (rank_major ? config.top_k : 1));
  arrays.local_ids = take(rank_major ? 4 * rows * config.top_k : 0);
  arrays.dots = take(rank_major || indexed ? 0 : 4 * rows);
  arrays.row_weights = take(rank_major ? 0 : 4 * rows);
  arrays.shared_outputs =
      take(config.shared_experts * config.max_tokens * config.hidden * bytes_of(config.combine_type));
  arrays.group_expert = take(4 * groups);
  arrays.counts = take(4 * groups);
  arrays.row_offsets = take(4 * (groups + 1));
  arrays.tile_offsets = take(4 * (groups + 1));
  if (indexed) {
    arrays.index = take(4 * rows);
    arrays.slot = take(4 * rows);
    arrays.block_group = take(4 * (rows / config.alignment));
    arrays.source_offsets = take(4 * (std::int64_t{config.placement.ranks()} + 1));
    arrays.source = take(row_room(config, rank).rows * static_cast<std::int64_t>(sizeof(Source)));
    arrays.index_bytes = arrays.bytes - arrays.index;
  }
  if (config.own_receive_buffers) {
    arrays.bytes = align_up(arrays.bytes, kReceivedRowsAlignment);
    const std::int64_t begin = arrays.bytes;
    // Every part is padded to 64 bytes. Tiles leave less than a row of the largest tiles unused for each
    // group, and one for the capacity.
    const Encoding encoding = encoding_of(config.format);
    const std::int64_t row_tiles = row_tile_bytes(largest_scale_tiles(config.hidden));
    const std::int64_t unused = encoding.scale_tiles ? (groups + 1) * row_tiles : 0;
    arrays.parts = take(receive_buffer_bytes(config, rank) + unused + kMaxParts * 64);
    arrays.parts_bytes = arrays.bytes - begin;
  }
  return arrays;
}

Lane::Lane(const CpuContext& exchange_context, std::unique_ptr<PeerLink> link_to_peers)
    : context(exchange_context),
      link(std::move(link_to_peers)),
      arrays(local_arrays(context.config, context.me())),
      counts(context.config.experts, context.config.layers),
      local_(arrays.bytes) {
  std::ranges::copy(group_experts(context.config, context.me()), array<std::int32_t>(arrays.group_expert));
}

OwnArrays Lane::own_arrays() const {
  const bool rank_major = context.config.layout == Layout::rank_major;
  return {.parts = {array<std::byte>(arrays.parts), static_cast<std::size_t>(arrays.parts_bytes)},
          .weight = array<float>(arrays.weight),
          .dots = array<float>(arrays.dots),
          .local_ids = rank_major ? array<std::int32_t>(arrays.local_ids) : nullptr,
          .counts = array<std::int32_t>(arrays.counts),
          .row_offsets = array<std::int32_t>(arrays.row_offsets),
          .tile_offsets = array<std::int32_t>(arrays.tile_offsets),
          .index = {array<std::byte>(arrays.index), static_cast<std::size_t>(arrays.index_bytes)},
          .plan = {array<std::byte>(arrays.plan), static_cast<std::size_t>(arrays.plan_bytes)},
          .totals = &totals};
}

void Lane::record_bad_source(std::int64_t entry) {
  BadSource& bad = diagnostics.bad_source;
  if (bad.count == 0 || entry < bad.index) bad.index = entry;
  bad.rank = context.me();
  ++bad.count;
}

int Lane::message_count(const PlanView& plan, int source, int destination) {
  const std::int64_t entry = std::int64_t{source} * context.ranks() + destination;
  return valid_count(plan.tokens_between[entry], context.config.max_tokens, entry);
}

Store store_for(std::int64_t bytes) {
  constexpr std::int64_t kCoreCacheBytes = 2 << 20;  // about a core's private cache
  return bytes > kCoreCacheBytes ? Store::streaming : Store::cached;
}

}  // namespace ferry::cpu
