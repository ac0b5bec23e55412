#include "tools/ferry/bench/traffic.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <set>
#include <vector>

#include "tools/ferry/common/config.hpp"

namespace ferry::app {

namespace {

void add_routing(const BenchPoint& point, const BenchInputs& inputs, int set, BenchRouting& sum) {
  std::vector<std::int64_t> load(static_cast<std::size_t>(point.ranks));
  for (int rank = 0; rank < point.ranks; ++rank) {
    const std::int32_t* id = inputs.ids(set, rank);
    for (int token = 0; token < point.tokens; ++token) {
      std::vector<bool> reached(static_cast<std::size_t>(point.ranks));
      for (int slot = 0; slot < point.config.top_k; ++slot, ++id) {
        if (*id < 0) continue;
        const auto to = static_cast<std::size_t>(point.config.placement.location(*id).rank);
        ++load[to];
        reached[to] = true;
      }
      const auto pairs = std::count(reached.begin(), reached.end(), true);
      sum.pairs += pairs;
      sum.remote_pairs += pairs - (reached[static_cast<std::size_t>(rank)] ? 1 : 0);
    }
  }
  const std::int64_t routes = std::accumulate(load.begin(), load.end(), std::int64_t{0});
  sum.routes += routes;
  if (routes > 0) {
    sum.busiest_share +=
        static_cast<double>(*std::max_element(load.begin(), load.end())) / static_cast<double>(routes);
  }
}

// Rows that leave and enter every rank.
struct RowCounts {
  explicit RowCounts(int ranks) : out(static_cast<std::size_t>(ranks)), in(out.size()) {}

  void add(int from, int to) {
    ++out[static_cast<std::size_t>(from)];
    ++in[static_cast<std::size_t>(to)];
  }
  double busiest() const {
    return static_cast<double>(
        std::max(*std::max_element(out.begin(), out.end()), *std::max_element(in.begin(), in.end())));
  }

  std::vector<std::int64_t> out, in;
};

RemoteRows busiest_of_set(const BenchPoint& point, const BenchInputs& inputs, int set) {
  RowCounts pairs(point.ranks), routes(point.ranks);
  const int top_k = point.config.top_k;
  std::vector<bool> reached(static_cast<std::size_t>(point.ranks));
  for (int rank = 0; rank < point.ranks; ++rank) {
    const std::int32_t* id = inputs.ids(set, rank);
    for (int token = 0; token < point.tokens; ++token) {
      std::fill(reached.begin(), reached.end(), false);
      for (int slot = 0; slot < top_k; ++slot, ++id) {
        if (*id < 0) continue;
        const int to = point.config.placement.location(*id).rank;
        if (to == rank) continue;
        routes.add(rank, to);
        if (!reached[static_cast<std::size_t>(to)]) pairs.add(rank, to);
        reached[static_cast<std::size_t>(to)] = true;
      }
    }
  }
  return {pairs.busiest(), routes.busiest()};
}

}  // namespace

BenchRouting routing_of(const BenchPoint& point, const BenchInputs& inputs) {
  constexpr int sets = BenchInputs::kSets;
  BenchRouting sum;
  for (int set = 0; set < sets; ++set) add_routing(point, inputs, set, sum);
  return {.routes = sum.routes / sets,
          .pairs = sum.pairs / sets,
          .remote_pairs = sum.remote_pairs / sets,
          .busiest_share = sum.busiest_share / sets};
}

RemoteRows busiest_remote_rows(const BenchPoint& point, const BenchInputs& inputs) {
  RemoteRows mean;
  for (int set = 0; set < BenchInputs::kSets; ++set) {
    const RemoteRows one = busiest_of_set(point, inputs, set);
    mean.pairs += one.pairs / BenchInputs::kSets;
    mean.routes += one.routes / BenchInputs::kSets;
  }
  return mean;
}

double lower_bound_bytes(const BenchPoint& point, const TimedCall& call, const RemoteRows& busiest) {
  const auto row = static_cast<double>(point.config.hidden * bytes_of(point.config.combine_type));
  const double dispatched = busiest.pairs * static_cast<double>(received_row_bytes(point.config));
  const double returned = (call.reduction == Reduction::partial ? busiest.pairs : busiest.routes) * row;
  switch (call.work) {
    case Work::dispatch:
    case Work::dispatch_plan:
      return dispatched;
    case Work::combine:
      return returned;
    case Work::pair:
      return dispatched + returned;
    case Work::metadata:
      return 0;
    case Work::nccl:
    case Work::nccl_rows:
      return busiest.pairs * row;
  }
  return 0;
}

namespace {

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
