#include "backends/cpu/lane.hpp"

#include <algorithm>

namespace ferry::cpu {

LaneArrays lane_arrays(const Config& config, int rank) {
  LaneArrays arrays;
  auto take = [&](std::int64_t bytes) {
    const std::int64_t begin = arrays.bytes;
    arrays.bytes = align_up(begin + bytes, 64);
    return begin;
  };
  const std::int64_t rows = row_capacity(config, rank), groups = groups_of(config, rank);
  const bool rank_major = config.layout == Layout::rank_major;
  arrays.plan = take(view_plan(nullptr, plan_shape(config)).bytes);
  arrays.weight = take(4 * rows * (rank_major ? config.top_k : 1));
  arrays.local_ids = take(rank_major ? 4 * rows * config.top_k : 0);
  arrays.dots = take(rank_major ? 0 : 4 * rows);
  arrays.row_weights = take(rank_major ? 0 : 4 * rows);
  arrays.group_expert = take(4 * groups);
  arrays.counts = take(4 * groups);
  arrays.row_offsets = take(4 * (groups + 1));
  if (config.own_receive_buffers) {
    const std::int64_t begin = arrays.bytes;
    // Holds the parts of every format whose messages are not larger than the configuration's: a row takes on
    // arrival what it takes in a message, or less. Columns start at multiples of a few rows, parts at
    // multiples of 64 bytes.
    const std::int64_t row = wire_bytes(parts_of(config.format, config.hidden));
    arrays.parts = take((rows + kColumnAlignment - 1) * row + kMaxParts * 64);
    arrays.parts_bytes = arrays.bytes - begin;
  }
  return arrays;
}

Lane::Lane(const Shared& of_exchange, int number)
    : shared(of_exchange),
      index(number),
      channel(shared.rank, shared.memory, shared.layout.signals_of(number), note_bytes(shared.config),
              shared.config.deadline),
      arrays(lane_arrays(shared.config, shared.me())),
      expert_load(static_cast<std::size_t>(shared.config.experts), 0),
      local_(arrays.bytes) {}

void Lane::record_bad_source(std::int64_t where) {
  BadSource& bad = findings.bad_source;
  if (bad.count == 0 || where < bad.index) bad.index = where;
  bad.rank = shared.me();
  ++bad.count;
}

int Lane::messages_between(const PlanView& plan, int source, int destination) {
  const std::int64_t where = std::int64_t{source} * shared.ranks() + destination;
  const std::int32_t count = plan.tokens_between[where];
  return usable(count, std::int64_t{shared.config.max_tokens} + 1, where) ? count : 0;
}

Store store_for(std::int64_t bytes) {
  constexpr std::int64_t kCacheShare = 2 << 20;  // about a core's own cache
  return bytes > kCacheShare ? Store::streaming : Store::cached;
}

}  // namespace ferry::cpu
