#include "tools/ferry/bench/traffic.hpp"

#include <algorithm>
#include <vector>

#include "format/parts.hpp"

namespace ferry::app {

namespace {

// Rows out of and into every rank.
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

RemoteRows busiest_remote_rows(const BenchPoint& point, const BenchInputs& inputs) {
  RemoteRows mean;
  for (int set = 0; set < BenchInputs::kSets; ++set) {
    const RemoteRows one = busiest_of_set(point, inputs, set);
    mean.pairs += one.pairs / BenchInputs::kSets;
    mean.routes += one.routes / BenchInputs::kSets;
  }
  return mean;
}

double lower_bound_bytes(const BenchPoint& point, const GpuWork& work, const RemoteRows& busiest) {
  const PartList parts = parts_of(point.config.format, point.config.hidden);
  double message = 0;
  for (int p = 0; p < parts.count; ++p) message += static_cast<double>(parts.part[p].row_bytes);
  const auto row = static_cast<double>(point.config.hidden * bytes_of(point.config.combine_type));
  const double sent = busiest.pairs * message;
  const double home = (work.reduction == Reduction::partial ? busiest.pairs : busiest.routes) * row;
  switch (work.work) {
    case Work::dispatch:
    case Work::dispatch_plan:
      return sent;
    case Work::combine:
      return home;
    case Work::pair:
      return sent + home;
    case Work::metadata:
      return 0;
    case Work::nccl:
    case Work::nccl_rows:
      return busiest.pairs * row;
  }
  return 0;
}

}  // namespace ferry::app
