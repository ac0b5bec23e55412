#include "tools/ferry/run/planned_messages.hpp"

#include <cstdint>
#include <span>
#include <vector>

namespace ferry::app {

namespace {

// [ranks][ranks], from and to.
class Matrix {
 public:
  Matrix(std::span<std::int64_t> messages, int ranks) : messages_(messages), ranks_(ranks) {}
  std::int64_t& operator()(int from, int to) const {
    return messages_[static_cast<std::size_t>(from) * static_cast<std::size_t>(ranks_) +
                     static_cast<std::size_t>(to)];
  }

 private:
  std::span<std::int64_t> messages_;
  int ranks_;
};

// Routes of one token to each rank, [ranks].
using RoutesToRank = std::vector<int>;

// Rows that a rank returns for a token.
int rows_of(const Config& config, int routes) {
  if (config.transfer == Transfer::gather) return 1;
  return config.reduction == Reduction::partial ? (routes > 0 ? 1 : 0) : routes;
}

// The messages between `source` and one node that has routes of the token. `entries`: ranks that messages to
// a relay are for.
void add_node(const Config& config, const Topology& topology, int source, int node,
              const RoutesToRank& routes, const Matrix& dispatch, const Matrix& entries,
              const Matrix& combine) {
  const bool relayed = config.hops == Hops::two && node != topology.node_of(source);
  const int relay = relayed ? topology.relay_of(source, node) : source;
  int rows = 0;
  for (const int rank : topology.ranks_of(node)) {
    const int here = rows_of(config, routes[static_cast<std::size_t>(rank)]);
    rows += here;
    if (here > 0 && relayed) entries(source, relay) += 1;
    if (here == 0 || (relayed && rank == relay)) continue;
    dispatch(relay, rank) += 1;
    combine(rank, relay) += here;
  }
  if (!relayed || rows == 0) return;
  dispatch(source, relay) += 1;
  combine(relay, source) += relays_add(config) ? 1 : rows;
}

}  // namespace

bool relays_add(const Config& config) {
  return config.hops == Hops::two && config.reduction == Reduction::partial &&
         config.reduction_level == ReductionLevel::node;
}

void add_planned_messages(const RunSpec& spec, const Config& config, const Topology& topology, int step,
                          const SharedResults& results) {
  const int ranks = topology.ranks();
  const Matrix sent(results.dispatch_messages(), ranks), entries(results.dispatch_entries(), ranks),
      returned(results.combine_messages(), ranks);
  for (int source = 0; source < ranks; ++source) {
    const Routes routes = make_routes(spec, step, source);
    for (std::size_t token = 0; token < routes.ids.size(); token += static_cast<std::size_t>(config.top_k)) {
      RoutesToRank to_rank(static_cast<std::size_t>(ranks), 0);
      for (std::size_t slot = 0; slot < static_cast<std::size_t>(config.top_k); ++slot) {
        const int expert = routes.ids[token + slot];
        if (expert < 0) continue;
        const int rank = config.placement.location(expert).rank;
        if (config.input == Input::own || rank == source) ++to_rank[static_cast<std::size_t>(rank)];
      }
      for (int node = 0; node < topology.nodes(); ++node)
        add_node(config, topology, source, node, to_rank, sent, entries, returned);
    }
  }
}

}  // namespace ferry::app
