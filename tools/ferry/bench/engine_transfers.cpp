#include "tools/ferry/bench/engine_transfers.hpp"

#include <cstddef>
#include <numeric>
#include <set>

namespace ferry::app {

namespace {

std::size_t at(int index) {
  return static_cast<std::size_t>(index);
}

RankMatrix zeros(int ranks) {
  return RankMatrix(at(ranks), std::vector<std::int64_t>(at(ranks)));
}

// Where a message goes from `source`, for a route to an expert of `rank`; `source` itself if it does not
// leave the rank, or, with two hops, the node.
int destination(const BenchPoint& point, const Topology& topology, int source, int rank) {
  if (topology.nodes() == 1 || point.config.hops != Hops::two) return rank;
  const int node = topology.node_of(rank);
  return node == topology.node_of(source) ? source : topology.relay_of(source, node);
}

}  // namespace

RankMatrix messages_between(const BenchPoint& point, const BenchInputs& inputs, int set,
                            const Topology& topology) {
  RankMatrix messages = zeros(point.ranks);
  for (int source = 0; source < point.ranks; ++source) {
    const std::int32_t* id = inputs.ids(set, source);
    for (int token = 0; token < point.tokens; ++token) {
      std::set<int> reached{source};
      for (int slot = 0; slot < point.config.top_k; ++slot, ++id) {
        if (*id < 0) continue;
        const int rank = point.config.placement.location(*id).rank;
        const int to = destination(point, topology, source, rank);
        if (reached.insert(to).second) ++messages[at(source)][at(to)];
      }
    }
  }
  return messages;
}

RankMatrix rows_between(const BenchPoint& point, const BenchInputs& inputs, int set,
                        const Topology& topology) {
  RankMatrix rows = zeros(point.ranks);
  if (point.config.reduction == Reduction::partial) {
    const RankMatrix messages = messages_between(point, inputs, set, topology);
    for (int source = 0; source < point.ranks; ++source) {
      for (int rank = 0; rank < point.ranks; ++rank)
        rows[at(rank)][at(source)] = messages[at(source)][at(rank)];
    }
    return rows;
  }
  for (int source = 0; source < point.ranks; ++source) {
    const std::int32_t* const ids = inputs.ids(set, source);
    for (std::int64_t route = 0; route < std::int64_t{point.tokens} * point.config.top_k; ++route) {
      if (ids[route] < 0) continue;
      const int from = destination(point, topology, source, point.config.placement.location(ids[route]).rank);
      if (from != source) ++rows[at(from)][at(source)];
    }
  }
  return rows;
}

std::int64_t sum_of(const std::vector<std::int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

std::int64_t PeerBytes::sent() const {
  return sum_of(send);
}
std::int64_t PeerBytes::received() const {
  return sum_of(receive);
}

PeerBytes transfer_of(const RankMatrix& messages, const std::vector<std::int64_t>& bytes, int rank) {
  const auto part = [&](std::size_t from, std::size_t to) {
    const std::int64_t all = sum_of(messages[from]);
    return all == 0 ? 0 : bytes[from] * messages[from][to] / all;
  };
  PeerBytes transfer;
  for (std::size_t peer = 0; peer < messages.size(); ++peer) {
    transfer.send.push_back(part(at(rank), peer));
    transfer.receive.push_back(part(peer, at(rank)));
  }
  return transfer;
}

}  // namespace ferry::app
