#include "oracle/row_positions.hpp"

#include <algorithm>
#include <tuple>

namespace ferry::oracle {
namespace {

// The sort key of one row: a route, or a token in the group of a shared expert; in rank_major a (token,
// destination).
struct RowKey {
  int destination;
  int group;  // shared expert, or S + local expert; rank_major: source rank
  int source;
  std::int32_t token;
  int slot;  // shared expert s: K + s; rank_major: -1

  auto order() const { return std::tie(destination, group, source, token, slot); }
  bool operator<(const RowKey& other) const { return order() < other.order(); }
  bool operator==(const RowKey& other) const { return order() == other.order(); }
};

void record_bad_id(RowPositions& positions, int rank, std::int32_t token, int slot, std::int64_t id) {
  BadId& bad = positions.bad_ids[rank];
  if (bad.count++ == 0) bad = {.rank = rank, .token = token, .slot = slot, .id = id, .count = 1};
}

// Number of the replica, among those of all experts, that a route takes. Written from the contract.
int replica_of(const GlobalInputs& inputs, const Placement& placement, const Source& route, int expert) {
  int first = 0;
  for (int e = 0; e < expert; ++e) first += static_cast<int>(placement.replicas_of(e).size());
  const std::uint64_t source = inputs.config.input == Input::replicated ? 0 : route.rank;
  std::uint64_t x =
      (route.token * 2654435761ull + source * 2246822519ull + route.slot * 3266489917ull) % (1ull << 32);
  x = (x ^ x / 65536) * 2246822507ull % (1ull << 32);
  x = (x ^ x / 8192) * 3266489909ull % (1ull << 32);
  x = x ^ x / 65536;
  return first + static_cast<int>(x % placement.replicas_of(expert).size());
}

// Fills the destinations, the counts and the bad ids of one rank's routes.
void read_ids(const GlobalInputs& inputs, const Placement& placement, int rank, RowPositions& positions) {
  const RankInputs& rank_inputs = inputs.ranks[rank];
  const int experts = inputs.config.experts;
  for (std::int32_t token = 0; token < rank_inputs.tokens; ++token) {
    std::vector<bool> is_destination(inputs.ranks.size(), inputs.config.transfer == Transfer::gather);
    for (int slot = 0; slot < positions.top_k; ++slot) {
      const std::int64_t id = rank_inputs.ids[std::int64_t{token} * positions.top_k + slot];
      if (id < -1 || id >= experts) record_bad_id(positions, rank, token, slot, id);
      if (id < 0 || id >= experts) continue;
      const int replica = replica_of(inputs, placement, {rank, token, slot}, static_cast<int>(id));
      const ExpertLocation expert = placement.locations()[replica];
      if (inputs.config.input == Input::replicated && expert.rank != rank) continue;  // another rank keeps it
      positions.routes[rank][std::int64_t{token} * positions.top_k + slot] = {expert.rank, expert.local, -1};
      positions.counts[rank * placement.total_replicas() + replica] += 1;
      is_destination[expert.rank] = true;
    }
    for (int to = 0; to < positions.size(); ++to)
      positions.tokens_between[rank * positions.size() + to] += is_destination[to];
  }
}

// Whether the rank takes the token for the shared experts: with shared_split = W rank r has those from r*N/W
// up to (r+1)*N/W.
bool has_shared_rows(const Config& config, int rank, std::int64_t token, std::int64_t tokens) {
  const std::int64_t split = config.shared_split;
  if (split == 0) return true;
  return rank < split && token >= rank * tokens / split && token < (rank + 1) * tokens / split;
}

std::vector<RowKey> sorted_row_keys(const RowPositions& positions, const Config& config) {
  const Layout layout = config.layout;
  std::vector<RowKey> all;
  for (int source = 0; source < positions.size(); ++source) {
    for (std::int32_t token = 0; token < positions.tokens(source); ++token) {
      for (int slot = 0; slot < positions.top_k; ++slot) {
        const RouteTarget& route = positions.route(source, token, slot);
        if (route.destination < 0) continue;
        if (layout == Layout::rank_major) {
          all.push_back({route.destination, source, source, token, -1});
        } else {
          all.push_back({route.destination, config.shared_experts + route.local, source, token, slot});
        }
      }
      if (!has_shared_rows(config, source, token, positions.tokens(source))) continue;
      for (int shared = 0; shared < config.shared_experts; ++shared)
        all.push_back({source, shared, source, token, positions.top_k + shared});
    }
  }
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

void set_row(RowPositions& positions, const RowKey& key, std::int64_t row) {
  if (key.slot >= positions.top_k)
    positions.shared_rows[key.source][key.slot - positions.top_k][key.token] = row;
  for (int slot = 0; slot < positions.top_k; ++slot) {
    RouteTarget& route = positions.routes[key.source][std::int64_t{key.token} * positions.top_k + slot];
    if (key.slot == slot || (key.slot < 0 && route.destination == key.destination)) route.row = row;
  }
}

// Assigns the rows of one group, from row `first` on: at most `room` rows, padded to the alignment.
void assign_group(RowPositions& positions, RankRows& rank, const RowKey* begin, std::int64_t needed,
                  std::int64_t first, std::int64_t room, std::int64_t alignment) {
  const std::int64_t kept = std::clamp<std::int64_t>(room, 0, needed);
  const std::int64_t end = std::min(round_up(needed, alignment), std::max<std::int64_t>(room, 0));
  if (static_cast<std::int64_t>(rank.rows.size()) < first + end) rank.rows.resize(first + end);
  for (std::int64_t i = 0; i < kept; ++i) {
    const RowKey& key = begin[i];
    rank.rows[first + i] = {RowState::kept, key.group, {key.source, key.token, key.slot}};
    set_row(positions, key, first + i);
  }
  for (std::int64_t i = kept; i < end; ++i) rank.rows[first + i].state = RowState::padding;
  rank.counts.push_back(static_cast<std::int32_t>(kept));
  rank.dropped += needed - kept;
}

void assign_rank(const Config& config, const std::vector<RowKey>& all, int index, int groups,
                 RowPositions& positions) {
  RankRows& rank = positions.ranks[index];
  const bool padded = config.layout == Layout::expert_padded;
  std::int64_t first = 0;  // first row of the group, as if the capacity were unlimited
  for (int group = 0; group < groups; ++group) {
    const auto begin = std::lower_bound(all.begin(), all.end(), RowKey{index, group, 0, 0, -1});
    const auto end = std::lower_bound(begin, all.end(), RowKey{index, group + 1, 0, 0, -1});
    const std::int64_t needed = end - begin;
    if (padded) first = group * rank.capacity;
    const std::int64_t room = padded ? rank.capacity : rank.capacity - first;
    const std::int64_t offset = padded ? first : std::min(first, rank.capacity);
    rank.row_offsets.push_back(static_cast<std::int32_t>(offset));
    assign_group(positions, rank, all.data() + (begin - all.begin()), needed, offset, room, config.alignment);
    first += round_up(needed, config.alignment);
    rank.needed = padded ? std::max(rank.needed, round_up(needed, config.alignment)) : first;
  }
  const std::int64_t total = padded ? groups * rank.capacity : std::min(first, rank.capacity);
  rank.row_offsets.push_back(static_cast<std::int32_t>(total));
  rank.rows.resize(total);
}

}  // namespace

Overflow find_overflow(const RowPositions& positions, const std::vector<std::int64_t>& limits) {
  Overflow worst;
  for (int rank = 0; rank < positions.size(); ++rank) {
    const RankRows& rows = positions.ranks[rank];
    const bool limited = !limits.empty() && limits[rank] >= 0;
    const std::int64_t past = limited ? std::max<std::int64_t>(rows.row_offsets.back() - limits[rank], 0) : 0;
    worst.dropped += rows.dropped + past;
    if (rows.dropped + past > 0 && rows.needed > worst.needed) {
      worst.rank = rank;
      worst.capacity = past > 0 ? limits[rank] : rows.capacity;
      worst.needed = rows.needed;
    }
  }
  return worst;
}

Placement placement_of(const Config& config, int ranks) {
  return config.placement.empty() ? Placement::blocks(config.experts, ranks) : config.placement;
}

int expert_groups(const Config& config, const Placement& placement, int rank) {
  return config.local_slots > 0 ? config.local_slots : placement.local_experts(rank);
}

std::int64_t capacity_of(const Config& config, const Placement& placement, int rank) {
  if (config.capacity > 0) return config.capacity;
  const std::int64_t sources = config.input == Input::replicated ? 1 : placement.ranks();
  const std::int64_t tokens = sources * config.max_tokens;
  const std::int64_t slots = config.top_k, experts = expert_groups(config, placement, rank),
                     align = config.alignment;
  if (config.layout == Layout::rank_major) return tokens;
  if (config.layout == Layout::expert_padded) return round_up(tokens * (config.repeats ? slots : 1), align);
  const std::int64_t shared = config.shared_experts * round_up(config.max_tokens, align);
  const std::int64_t most = config.repeats && experts > 0 ? slots : std::min(slots, experts);
  const std::int64_t rows = tokens * most;
  return (rows + experts * (align - 1)) / align * align + shared;
}

RowPositions find_row_positions(const GlobalInputs& inputs) {
  const Config& config = inputs.config;
  const int ranks = inputs.size();
  const Placement placement = placement_of(config, ranks);
  RowPositions positions;
  positions.top_k = config.top_k;
  positions.ranks.resize(ranks);
  positions.routes.resize(ranks);
  positions.shared_rows.resize(ranks);
  positions.bad_ids.resize(ranks);
  positions.counts.resize(std::size_t(ranks) * placement.total_replicas());
  positions.tokens_between.resize(std::size_t(ranks) * ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    positions.routes[rank].resize(inputs.ranks[rank].tokens * config.top_k);
    read_ids(inputs, placement, rank, positions);
    positions.shared_rows[rank].resize(config.shared_experts,
                                       std::vector<std::int64_t>(inputs.ranks[rank].tokens, -1));
  }

  const std::vector<RowKey> keys = sorted_row_keys(positions, config);
  for (int rank = 0; rank < ranks; ++rank) {
    const bool by_source = config.layout == Layout::rank_major;
    const int shared = config.shared_experts;
    const int groups = by_source ? ranks : shared + expert_groups(config, placement, rank);
    positions.ranks[rank].capacity = capacity_of(config, placement, rank);
    for (int g = 0; g < groups; ++g) {
      const bool filled = g < shared + placement.local_experts(rank);
      const int expert = by_source || !filled ? -1
                         : g < shared         ? config.experts + g
                                              : placement.experts_of(rank)[g - shared];
      positions.ranks[rank].group_expert.push_back(expert);
    }
    assign_rank(config, keys, rank, groups, positions);
  }
  positions.overflow = find_overflow(positions);
  return positions;
}

}  // namespace ferry::oracle
