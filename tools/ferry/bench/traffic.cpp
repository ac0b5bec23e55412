#include "tools/ferry/bench/traffic.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>
#include <vector>

#include "tools/ferry/common/config.hpp"

namespace ferry::app {

namespace {

RankMatrix zeros(int ranks) {
  return RankMatrix(at(ranks), std::vector<std::int64_t>(at(ranks)));
}

// A set's routes by source rank and destination, and its distinct pairs of token and destination.
struct SetCounts {
  RankMatrix routes, pairs;
};

// `destination(source, rank)`: where a route to an expert of `rank` goes first.
template <class Destination>
SetCounts counts_of(const BenchPoint& point, const BenchInputs& inputs, int set, Destination destination) {
  SetCounts counts{zeros(point.ranks), zeros(point.ranks)};
  std::vector<std::int64_t> last(at(point.ranks), -1);  // the last token that went there
  std::int64_t number = 0;
  for (int source = 0; source < point.ranks; ++source) {
    const std::int32_t* id = inputs.ids(set, source);
    for (int token = 0; token < point.tokens; ++token, ++number) {
      for (int slot = 0; slot < point.config.top_k; ++slot, ++id) {
        if (*id < 0) continue;
        const std::size_t to = at(destination(source, point.config.placement.location(*id).rank));
        ++counts.routes[at(source)][to];
        if (std::exchange(last[to], number) != number) ++counts.pairs[at(source)][to];
      }
    }
  }
  return counts;
}

SetCounts counts_by_rank(const BenchPoint& point, const BenchInputs& inputs, int set) {
  return counts_of(point, inputs, set, [](int, int rank) { return rank; });
}

// As messages travel: what does not leave its rank, or with two hops its node, stays with `source`.
SetCounts counts_by_message(const BenchPoint& point, const BenchInputs& inputs, int set,
                            const Topology& topology) {
  const bool relayed = topology.nodes() > 1 && point.config.hops == Hops::two;
  return counts_of(point, inputs, set, [&](int source, int rank) {
    if (!relayed) return rank;
    const int node = topology.node_of(rank);
    return node == topology.node_of(source) ? source : topology.relay_of(source, node);
  });
}

RankMatrix without_diagonal(RankMatrix matrix) {
  for (std::size_t rank = 0; rank < matrix.size(); ++rank) matrix[rank][rank] = 0;
  return matrix;
}

RankMatrix transposed(const RankMatrix& matrix) {
  RankMatrix other = matrix;
  for (std::size_t from = 0; from < matrix.size(); ++from)
    for (std::size_t to = 0; to < matrix.size(); ++to) other[to][from] = matrix[from][to];
  return other;
}

std::int64_t total_of(const RankMatrix& matrix) {
  std::int64_t sum = 0;
  for (const std::vector<std::int64_t>& row : matrix) sum += sum_of(row);
  return sum;
}

std::int64_t largest_row_sum(const RankMatrix& matrix) {
  std::int64_t most = 0;
  for (const std::vector<std::int64_t>& row : matrix) most = std::max(most, sum_of(row));
  return most;
}

// What the busiest rank sends to others or receives from them.
double busiest_remote(const RankMatrix& matrix) {
  const RankMatrix remote = without_diagonal(matrix);
  return static_cast<double>(std::max(largest_row_sum(remote), largest_row_sum(transposed(remote))));
}

}  // namespace

BenchRouting routing_of(const BenchPoint& point, const BenchInputs& inputs) {
  constexpr int sets = BenchInputs::kSets;
  BenchRouting sum;
  for (int set = 0; set < sets; ++set) {
    const SetCounts counts = counts_by_rank(point, inputs, set);
    const std::int64_t routes = total_of(counts.routes);
    sum.routes += routes;
    sum.pairs += total_of(counts.pairs);
    sum.remote_pairs += total_of(without_diagonal(counts.pairs));
    if (routes > 0)
      sum.busiest_share +=
          static_cast<double>(largest_row_sum(transposed(counts.routes))) / static_cast<double>(routes);
  }
  return {.routes = sum.routes / sets,
          .pairs = sum.pairs / sets,
          .remote_pairs = sum.remote_pairs / sets,
          .busiest_share = sum.busiest_share / sets};
}

RemoteRows busiest_remote_rows(const BenchPoint& point, const BenchInputs& inputs) {
  RemoteRows mean;
  for (int set = 0; set < BenchInputs::kSets; ++set) {
    const SetCounts counts = counts_by_rank(point, inputs, set);
    mean.pairs += busiest_remote(counts.pairs) / BenchInputs::kSets;
    mean.routes += busiest_remote(counts.routes) / BenchInputs::kSets;
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

RankMatrix messages_between(const BenchPoint& point, const BenchInputs& inputs, int set,
                            const Topology& topology) {
  return without_diagonal(counts_by_message(point, inputs, set, topology).pairs);
}

RankMatrix rows_between(const BenchPoint& point, const BenchInputs& inputs, int set,
                        const Topology& topology) {
  const SetCounts counts = counts_by_message(point, inputs, set, topology);
  return transposed(
      without_diagonal(point.config.reduction == Reduction::partial ? counts.pairs : counts.routes));
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
