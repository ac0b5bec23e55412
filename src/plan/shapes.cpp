#include "plan/shapes.hpp"

#include <algorithm>

namespace ferry {
namespace {

// The most tokens that have rows on a rank.
std::int64_t most_tokens(const Config& config) {
  const std::int64_t sources =
      config.input == Input::replicated ? 1 : config.placement.ranks() / config.placement.tp();
  return sources * config.max_tokens;
}

// The most routes that any routing sends to `rank`. Without repeats, a token has at most one route to each
// expert.
std::int64_t most_routes(const Config& config, int rank) {
  const int local = local_slots_of(config, rank);
  const int per_token = config.repeats ? (local > 0 ? config.top_k : 0) : std::min(config.top_k, local);
  return most_tokens(config) * per_token;
}

}  // namespace

PlanShape plan_shape(const Config& config) {
  PlanShape shape{.ranks = config.placement.ranks(),
                  .experts = config.experts,
                  .top_k = config.top_k,
                  .max_tokens = config.max_tokens,
                  .shared_experts = config.shared_experts,
                  .to_every_rank = config.transfer == Transfer::gather};
  for (int rank = 0; rank < shape.ranks; ++rank)
    shape.capacity = std::max(shape.capacity, row_capacity(config, rank));
  return shape;
}

ExchangeShape exchange_shape(const Config& config, std::int64_t signal_bytes) {
  const PartList parts = parts_of(config.format, config.hidden);
  const std::int64_t ranks_of_token = plan_shape(config).most_ranks();
  const bool partial = config.reduction == Reduction::partial;
  return {.ranks = config.placement.ranks(),
          .top_k = config.top_k,
          .max_tokens = config.max_tokens,
          .lanes = config.lanes,
          .signal_bytes = signal_bytes,
          .message_bytes = message_layout(parts, config.top_k).bytes,
          .combine_row_bytes = combine_row_layout(config.combine_type, config.hidden, config.top_k).bytes,
          .combine_rows = config.max_tokens * (partial ? ranks_of_token : std::int64_t{config.top_k})};
}

SharedRows shared_rows(const Config& config, int rank, std::int64_t tokens) {
  const auto [first, count] = SharedTokens::of<std::int64_t>(tokens, rank, config.shared_split);
  const bool padded = config.layout == Layout::expert_padded;
  return {.first = first,
          .count = count,
          .stride = padded ? group_capacity(config, rank) : align_up(count, config.alignment),
          .capacity = row_capacity(config, rank)};
}

std::int64_t total_rows(const Config& config, int rank, std::int64_t tokens, std::int64_t messages,
                        std::span<const std::int32_t> routes) {
  const std::int64_t capacity = row_capacity(config, rank);
  if (config.layout == Layout::expert_padded) return capacity;
  if (config.layout == Layout::rank_major) return std::min(messages, capacity);
  std::int64_t rows = config.shared_experts * shared_rows(config, rank, tokens).stride;
  for (const std::int32_t of_expert : routes) rows += align_up(of_expert, config.alignment);
  return std::min(rows, capacity);
}

std::int64_t call_summary_bytes(const Config& config) {
  return align_up(4LL * (kCallSummaryWords + config.experts + config.placement.ranks()), 16);
}

std::int64_t group_capacity(const Config& config, int rank) {
  if (config.layout != Layout::expert_padded) return row_capacity(config, rank);
  if (config.capacity > 0) return config.capacity;
  const std::int64_t most = most_tokens(config);
  return align_up(config.repeats ? most * config.top_k : most, config.alignment);
}

std::int64_t row_capacity(const Config& config, int rank) {
  const int local = local_slots_of(config, rank);
  switch (config.layout) {
    case Layout::expert_padded:
      return (config.shared_experts + local) * group_capacity(config, rank);
    case Layout::rank_major:
      return config.capacity > 0 ? config.capacity : most_tokens(config);
    case Layout::expert_major:
    case Layout::expert_indexed:
      break;
  }
  if (config.capacity > 0) return config.capacity;
  // Groups start at multiples of the alignment, so the rows lost by rounding down could never be used.
  const std::int64_t most = most_routes(config, rank) + std::int64_t{local} * (config.alignment - 1);
  return most / config.alignment * config.alignment +
         config.shared_experts * align_up(config.max_tokens, config.alignment);
}

RowRoom row_room(const Config& config, int rank) {
  const bool padded = config.layout == Layout::expert_padded;
  const bool indexed = config.layout == Layout::expert_indexed;
  return {.rows = indexed ? most_tokens(config) : row_capacity(config, rank),
          .groups = groups_of(config, rank),
          .group_rows = padded ? group_capacity(config, rank) : 0};
}

std::int64_t receive_buffer_bytes(const Config& config, int rank) {
  const RowRoom room = row_room(config, rank);
  const std::int64_t added = aligned_rows(room) - room.rows;
  return room.rows * wire_bytes(parts_of(config.format, config.hidden)) +
         added * largest_scale_tiles(config.hidden).row_bytes;
}

int local_slots_of(const Config& config, int rank) {
  return config.local_slots > 0 ? config.local_slots : config.placement.local_experts(rank);
}

int groups_of(const Config& config, int rank) {
  return config.layout == Layout::rank_major ? config.placement.ranks()
                                             : config.shared_experts + local_slots_of(config, rank);
}

std::vector<std::int32_t> group_experts(const Config& config, int rank) {
  std::vector<std::int32_t> experts;
  if (config.layout != Layout::rank_major) {
    for (int shared = 0; shared < config.shared_experts; ++shared) experts.push_back(config.experts + shared);
    const std::vector<int>& local = config.placement.experts_of(rank);
    experts.insert(experts.end(), local.begin(), local.end());
  }
  experts.resize(static_cast<std::size_t>(groups_of(config, rank)), -1);
  return experts;
}

std::uint64_t row_order_hash(const Config& config) {
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  // The positions of expert_indexed are the rows of expert_major.
  const Layout layout = config.layout == Layout::expert_indexed ? Layout::expert_major : config.layout;
  auto mix = [&](std::uint64_t value) {
    for (int byte = 0; byte < 8; ++byte) hash = (hash ^ ((value >> (8 * byte)) & 0xff)) * 0x100000001b3;
  };
  for (const std::int64_t value :
       {std::int64_t{config.experts}, std::int64_t{config.top_k}, std::int64_t{config.max_tokens},
        std::int64_t{config.placement.ranks()}, static_cast<std::int64_t>(layout),
        std::int64_t{config.alignment}, config.capacity, std::int64_t{config.repeats},
        std::int64_t{config.local_slots}, std::int64_t{config.shared_experts},
        static_cast<std::int64_t>(config.input), std::int64_t{config.shared_split},
        static_cast<std::int64_t>(config.transfer)}) {
    mix(static_cast<std::uint64_t>(value));
  }
  for (const ExpertLocation& location : config.placement.locations()) {
    mix(static_cast<std::uint64_t>(location.rank) << 32 | static_cast<std::uint32_t>(location.local));
  }
  return hash;
}

}  // namespace ferry
