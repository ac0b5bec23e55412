#include "oracle/expected.hpp"

#include <algorithm>

namespace ferry::oracle {

StepMetadata step_metadata(const std::vector<std::int32_t>& counts, int rank) {
  StepMetadata all;
  for (int r = 0; r < static_cast<int>(counts.size()); ++r) {
    all.sum += counts[r];
    all.prefix += r < rank ? counts[r] : 0;
    all.maximum = r == 0 ? counts[r] : std::max(all.maximum, counts[r]);
  }
  return all;
}

namespace {

bool same_node(const Travel& travel, int a, int b) {
  return travel.topology.node_of(a) == travel.topology.node_of(b);
}

// The relay for `source` on the node of `expert_rank`.
int relay_of(const Travel& travel, int source, int expert_rank) {
  const std::vector<int>& ranks = travel.topology.ranks_of(travel.topology.node_of(expert_rank));
  return ranks[travel.topology.local_rank_of(source) % ranks.size()];
}

// Number of rows that `rank` returns to `source` in a combine.
std::int64_t returned_rows(const RowPositions& positions, int rank, int source, Reduction reduction) {
  if (reduction == Reduction::partial) return positions.tokens_between[source * positions.size() + rank];
  return std::count_if(positions.ranks[rank].rows.begin(), positions.ranks[rank].rows.end(),
                       [&](const RowInfo& row) { return row.source.rank == source; });
}

// Tokens of `source` with an expert on some rank of the node.
std::int64_t tokens_to_node(const RowPositions& positions, const Travel& travel, int source, int node) {
  std::int64_t tokens = 0;
  for (std::int64_t token = 0; token < positions.tokens(source); ++token) {
    bool there = false;
    for (int slot = 0; slot < positions.top_k; ++slot) {
      const int destination = positions.route(source, token, slot).destination;
      there |= destination >= 0 && travel.topology.node_of(destination) == node;
    }
    tokens += there;
  }
  return tokens;
}

}  // namespace

SentMessages dispatch_messages(const RowPositions& positions, const Travel& travel, int rank) {
  SentMessages sent;
  const int ranks = positions.size(), my_node = travel.topology.node_of(rank);
  for (int to = 0; to < ranks; ++to) {
    const std::int64_t tokens = to == rank ? 0 : positions.tokens_between[rank * ranks + to];
    if (same_node(travel, rank, to)) {
      sent.within_node += tokens;
    } else if (!travel.two_hops) {
      sent.between_nodes += tokens;
    }
  }
  if (!travel.two_hops) return sent;
  for (int node = 0; node < travel.topology.nodes(); ++node) {
    if (node != my_node) sent.between_nodes += tokens_to_node(positions, travel, rank, node);
  }
  for (int source = 0; source < ranks; ++source) {
    if (same_node(travel, source, rank) || relay_of(travel, source, rank) != rank) continue;
    for (const int to : travel.topology.ranks_of(my_node)) {
      if (to != rank) sent.within_node += positions.tokens_between[source * ranks + to];
    }
  }
  return sent;
}

SentMessages combine_messages(const RowPositions& positions, const Travel& travel, int rank,
                              Reduction reduction) {
  SentMessages sent;
  for (int source = 0; source < positions.size(); ++source) {
    const std::int64_t rows = source == rank ? 0 : returned_rows(positions, rank, source, reduction);
    const bool near = same_node(travel, rank, source);
    if (near || (travel.two_hops && relay_of(travel, source, rank) != rank)) {
      sent.within_node += rows;
    } else if (!travel.two_hops) {
      sent.between_nodes += rows;
    } else if (travel.relays_add && reduction == Reduction::partial) {
      sent.between_nodes += tokens_to_node(positions, travel, source, travel.topology.node_of(rank));
    } else {
      for (const int from : travel.topology.ranks_of(travel.topology.node_of(rank)))
        sent.between_nodes += returned_rows(positions, from, source, reduction);
    }
  }
  return sent;
}

}  // namespace ferry::oracle
