#include "apps/ferry/bench_floor.hpp"

#include <algorithm>
#include <vector>

#include "format/parts.hpp"

namespace ferry::app {

namespace {

// Rows out of and into every rank.
struct Crossing {
  explicit Crossing(int ranks) : out(static_cast<std::size_t>(ranks)), in(out.size()) {}

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

struct Rows {
  double pairs = 0, routes = 0;  // of the busiest rank
};

Rows rows_of_set(const BenchPoint& point, const BenchInputs& inputs, int set) {
  Crossing pairs(point.ranks), routes(point.ranks);
  const int top_k = point.config.top_k;
  std::vector<bool> reached(static_cast<std::size_t>(point.ranks));
  for (int rank = 0; rank < point.ranks; ++rank) {
    const std::int32_t* id = inputs.ids(set, rank);
    for (int token = 0; token < point.tokens; ++token) {
      std::fill(reached.begin(), reached.end(), false);
      for (int slot = 0; slot < top_k; ++slot, ++id) {
        if (*id < 0) continue;
        const int to = point.config.placement.place(*id).rank;
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

BenchFloor floor_of(const BenchPoint& point, const BenchInputs& inputs) {
  Rows mean;
  for (int set = 0; set < BenchInputs::kSets; ++set) {
    const Rows rows = rows_of_set(point, inputs, set);
    mean.pairs += rows.pairs / BenchInputs::kSets;
    mean.routes += rows.routes / BenchInputs::kSets;
  }
  const PartList parts = parts_of(point.config.format, point.config.hidden);
  double message = 0;
  for (int p = 0; p < parts.count; ++p) message += static_cast<double>(parts.part[p].row_bytes);
  const bool partial = point.config.reduction == Reduction::partial;
  const auto row = static_cast<double>(point.config.hidden * bytes_of(point.config.wire));
  return {.dispatch_bytes = mean.pairs * message,
          .combine_bytes = (partial ? mean.pairs : mean.routes) * row};
}

}  // namespace ferry::app
