#include "plan/planning.hpp"

#include <algorithm>
#include <numeric>

#include "format/parts.hpp"
#include "plan/shapes.hpp"
#include "plan/slot.hpp"

namespace ferry {
namespace {

std::int64_t id_at(const Ids& ids, std::int64_t index) {
  return ids.type == IdType::int64 ? static_cast<const std::int64_t*>(ids.data)[index]
                                   : static_cast<const std::int32_t*>(ids.data)[index];
}

// Inserts a rank in an ascending list without repeats; returns the new length.
int insert_rank(std::int32_t* ranks, int count, std::int32_t rank) {
  int at = count;
  while (at > 0 && ranks[at - 1] > rank) --at;
  if (at > 0 && ranks[at - 1] == rank) return count;
  for (int i = count; i > at; --i) ranks[i] = ranks[i - 1];
  ranks[at] = rank;
  return count + 1;
}

}  // namespace

void plan_sends(const Config& config, int rank, const Ids& ids, int tokens, const PlanView& plan,
                BadId& bad) {
  const int ranks = config.placement.ranks(), top_k = config.top_k,
            most_ranks = plan.header->shape.most_ranks();
  std::int32_t* counts = plan.counts + std::int64_t{rank} * config.experts;
  std::int32_t* tokens_to = plan.tokens_between + std::int64_t{rank} * ranks;
  std::fill_n(counts, config.experts, 0);
  std::fill_n(tokens_to, ranks, 0);
  for (std::int64_t token = 0; token < tokens; ++token) {
    std::int32_t* destinations = plan.token_ranks + token * most_ranks;
    int reached = 0;
    for (int slot = 0; slot < top_k; ++slot) {
      const std::int64_t route = token * top_k + slot, id = id_at(ids, route);
      plan.route_expert[route] = -1;
      plan.route_rank[route] = -1;
      const IdKind kind = classify_id(id, config.experts);
      if (kind == IdKind::expert) {
        const std::int32_t destination = config.placement.location(static_cast<int>(id)).rank;
        if (!keeps_route(config.input, destination, rank)) continue;
        plan.route_rank[route] = destination;
        plan.route_expert[route] = static_cast<std::int32_t>(id);
        ++counts[id];
        reached = insert_rank(destinations, reached, destination);
      } else if (kind == IdKind::bad && bad.count++ == 0) {
        bad = {.rank = rank, .token = static_cast<int>(token), .slot = slot, .id = id, .count = 1};
      }
    }
    if (config.transfer == Transfer::gather) {
      std::iota(destinations, destinations + ranks, 0);
      reached = ranks;
    }
    for (int i = 0; i < reached; ++i) {
      const std::int32_t destination = destinations[i];
      plan.sent_tokens[std::int64_t{destination} * config.max_tokens + tokens_to[destination]++] =
          static_cast<std::int32_t>(token);
    }
    std::fill(destinations + reached, destinations + most_ranks, -1);
  }
}

void RowOffsetTable::compute(const Config& config, const PlanView& plan) {
  ranks_ = config.placement.ranks();
  layout_ = config.layout;
  dropped_ = 0;
  capacity_.resize(static_cast<std::size_t>(ranks_));
  needed_.resize(static_cast<std::size_t>(ranks_));
  count_.resize(static_cast<std::size_t>(ranks_));
  offset_.resize(static_cast<std::size_t>(ranks_));
  for (int rank = 0; rank < ranks_; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    const auto groups = static_cast<std::size_t>(groups_of(config, rank));
    capacity_[r] = group_capacity(config, rank);
    count_[r].assign(groups, 0);
    offset_[r].assign(groups + 1, 0);
  }
  if (layout_ == Layout::rank_major) {
    compute_rank_rows(config, plan);
  } else {
    compute_expert_rows(config, plan);
  }
}

Overflow RowOffsetTable::overflow(std::span<const std::int32_t> limits) const {
  Overflow worst{.dropped = dropped_};
  for (int rank = 0; rank < ranks_; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    const std::int64_t limit = limits[r] < 0 ? capacity_[r] : limits[r];
    if (needed_[r] <= limit) continue;
    worst.dropped += std::min(needed_[r], capacity_[r]) - limit;
    if (needed_[r] > worst.needed) {
      worst.rank = rank;
      worst.capacity = limit;
      worst.needed = needed_[r];
    }
  }
  return worst;
}

void RowOffsetTable::compute_expert_rows(const Config& config, const PlanView& plan) {
  first_.resize(static_cast<std::size_t>(config.experts) * static_cast<std::size_t>(ranks_));
  const auto shared = static_cast<std::size_t>(config.shared_experts);
  const bool padded = layout_ == Layout::expert_padded;
  for (int rank = 0; rank < ranks_; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    const std::vector<int>& experts = config.placement.experts_of(rank);
    for (std::size_t g = 0; g < count_[r].size(); ++g) {
      const std::int64_t begin = padded ? 0 : offset_[r][g];
      std::int64_t row = begin;
      if (g < shared) {
        row += shared_rows(config, rank, plan.rank_tokens[rank]).count;
      } else if (g < shared + experts.size()) {
        const int expert = experts[g - shared];
        for (int source = 0; source < ranks_; ++source) {
          first_[static_cast<std::size_t>(expert) * static_cast<std::size_t>(ranks_) +
                 static_cast<std::size_t>(source)] = row;
          row += plan.counts[std::int64_t{source} * config.experts + expert];
        }
      }
      count_[r][g] = row - begin;
      offset_[r][g + 1] = padded ? offset_[r][g] + capacity_[r] : align_up(row, config.alignment);
    }
    const std::int64_t fullest =
        count_[r].empty() ? 0 : *std::max_element(count_[r].begin(), count_[r].end());
    needed_[r] = padded ? align_up(fullest, config.alignment) : offset_[r].back();
    for (std::size_t g = 0; g < count_[r].size(); ++g)
      dropped_ += count_[r][g] - count(rank, static_cast<int>(g));
  }
}

void RowOffsetTable::compute_rank_rows(const Config&, const PlanView& plan) {
  first_.resize(static_cast<std::size_t>(ranks_) * static_cast<std::size_t>(ranks_));
  for (int rank = 0; rank < ranks_; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    std::int64_t row = 0;
    for (int source = 0; source < ranks_; ++source) {
      const auto s = static_cast<std::size_t>(source);
      first_[r * static_cast<std::size_t>(ranks_) + s] = row;
      count_[r][s] = plan.tokens_between[std::int64_t{source} * ranks_ + rank];
      row += count_[r][s];
      offset_[r][s + 1] = row;
    }
    needed_[r] = row;
    dropped_ += std::max<std::int64_t>(0, row - capacity_[r]);
  }
}

std::int32_t RowOffsetTable::row_or_dropped(int rank, int group, std::int64_t row) const {
  const std::int64_t capacity = capacity_[static_cast<std::size_t>(rank)];
  if (row >= capacity) return -1;
  return static_cast<std::int32_t>(layout_ == Layout::expert_padded ? group * capacity + row : row);
}

std::int64_t RowOffsetTable::count(int rank, int group) const {
  const auto r = static_cast<std::size_t>(rank), g = static_cast<std::size_t>(group);
  const std::int64_t begin = layout_ == Layout::expert_padded ? 0 : offset_[r][g];
  return std::clamp<std::int64_t>(capacity_[r] - begin, 0, count_[r][g]);
}

std::int64_t RowOffsetTable::offset(int rank, int group) const {
  const auto r = static_cast<std::size_t>(rank), g = static_cast<std::size_t>(group);
  return layout_ == Layout::expert_padded ? offset_[r][g] : std::min(offset_[r][g], capacity_[r]);
}

std::int64_t RowOffsetTable::total(int rank) const {
  return offset(rank, static_cast<int>(count_[static_cast<std::size_t>(rank)].size()));
}

void plan_rows(const Config& config, int rank, const RowOffsetTable& offsets, const PlanView& plan) {
  const int top_k = config.top_k, ranks = config.placement.ranks();
  const bool rank_major = config.layout == Layout::rank_major;
  // Next row of this rank's routes: by expert, or in rank_major by destination.
  std::vector<std::int64_t> next(static_cast<std::size_t>(rank_major ? ranks : config.experts));
  for (std::size_t i = 0; i < next.size(); ++i) next[i] = offsets.first_row(static_cast<int>(i), rank);
  for (std::int64_t token = 0; token < plan.header->tokens; ++token) {
    for (int slot = 0; slot < top_k; ++slot) {
      const std::int64_t route = token * top_k + slot;
      const std::int32_t destination = plan.route_rank[route];
      plan.route_row[route] = -1;
      if (destination < 0) continue;
      if (rank_major) {
        plan.route_row[route] =
            offsets.row_or_dropped(destination, 0, next[static_cast<std::size_t>(destination)]);
        continue;
      }
      const int expert = plan.route_expert[route];
      const std::int64_t row = next[static_cast<std::size_t>(expert)]++;
      plan.route_row[route] = offsets.row_or_dropped(
          destination, config.shared_experts + config.placement.location(expert).local, row);
    }
    if (!rank_major) continue;
    const std::int32_t* destinations = plan.token_ranks + token * plan.header->shape.most_ranks();
    for (int i = 0; i < plan.header->shape.most_ranks() && destinations[i] >= 0; ++i) {
      ++next[static_cast<std::size_t>(destinations[i])];
    }
  }
}

RowAssigner::RowAssigner(const Config& config, int rank, const RowOffsetTable& offsets, const PlanView& plan)
    : config_(config),
      rank_(rank),
      groups_(config.layout == Layout::rank_major ? 1 : config.placement.local_experts(rank)),
      offsets_(offsets),
      plan_(plan) {
  for (int source = 0; source < config.placement.ranks(); ++source) {
    if (config.layout == Layout::rank_major) {
      next_.push_back(offsets.first_row_from(rank, source));
      continue;
    }
    for (const int expert : config.placement.experts_of(rank)) {
      next_.push_back(offsets.first_row(expert, source));
    }
  }
}

const std::int32_t* RowAssigner::assign(int source, std::int64_t i, int token, int position,
                                        const std::int32_t* ids) {
  const std::int64_t message = std::int64_t{source} * config_.max_tokens + i;
  plan_.received_token[message] = token;
  plan_.received_position[message] = position;
  std::int32_t* rows = plan_.received_rows_of_message + message * config_.top_k;
  const bool rank_major = config_.layout == Layout::rank_major;
  std::int64_t* next = next_.data() + source * groups_;
  const std::int32_t token_row = rank_major ? offsets_.row_or_dropped(rank_, 0, next[0]++) : -1;
  if (token_row >= 0) plan_.sources[token_row] = {source, token, -1};
  for (int slot = 0; slot < config_.top_k; ++slot) {
    rows[slot] = -1;
    int local = -1;
    const SlotKind kind = classify_slot(ids[slot], config_.experts, rank_, [&](std::int32_t expert) {
      const ExpertLocation location = config_.placement.location(expert);
      local = location.local;
      return location.rank;
    });
    if (kind != SlotKind::local) continue;
    if (rank_major) {
      rows[slot] = token_row;
      continue;
    }
    rows[slot] = offsets_.row_or_dropped(rank_, config_.shared_experts + local, next[local]++);
    if (rows[slot] >= 0) plan_.sources[rows[slot]] = {source, token, slot};
  }
  return rows;
}

void ScaleTiles::compute(Layout layout, std::span<const std::int32_t> offsets,
                         std::span<const std::int32_t> counts, std::int64_t group_capacity,
                         std::int64_t limit) {
  offsets_.assign(offsets.begin(), offsets.end());
  used_.clear();
  first_.assign(1, 0);
  for (const std::int32_t count : counts) {
    const std::int64_t begin = first_.back();
    const std::int64_t room = layout == Layout::expert_padded ? row_tiles(group_capacity) : row_tiles(count);
    used_.push_back(static_cast<std::int32_t>(std::min(row_tiles(count), limit - begin)));
    first_.push_back(static_cast<std::int32_t>(std::min(begin + room, limit)));
  }
}

std::int64_t ScaleTiles::tile_row(std::int64_t row) const {
  // Empty groups begin where the next one does: the last of them that begins here or before holds the row.
  const auto next = std::upper_bound(offsets_.begin(), offsets_.end(), row);
  if (next == offsets_.begin()) return -1;
  const auto group = static_cast<std::size_t>(next - offsets_.begin() - 1);
  const std::int64_t position = row - offsets_[group];
  return position < kTileRows * used_[group] ? kTileRows * first_[group] + position : -1;
}

}  // namespace ferry
