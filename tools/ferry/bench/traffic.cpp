#include "tools/ferry/bench/traffic.hpp"

#include <algorithm>
#include <numeric>
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

}  // namespace ferry::app
