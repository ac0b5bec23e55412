#include "ferry/topology.hpp"

#include <cstddef>
#include <map>

#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry {

Topology::Topology(const std::vector<int>& labels, bool simulated) : simulated_(simulated) {
  std::map<int, int> nodes;  // by label, numbered as their first ranks come
  for (std::size_t rank = 0; rank < labels.size(); ++rank) {
    const int node = nodes.try_emplace(labels[rank], static_cast<int>(nodes.size())).first->second;
    ranks_of_.resize(nodes.size());
    std::vector<int>& members = ranks_of_[static_cast<std::size_t>(node)];
    node_of_.push_back(node);
    local_rank_of_.push_back(static_cast<int>(members.size()));
    members.push_back(static_cast<int>(rank));
  }
}

Topology Topology::blocks(int ranks, int nodes, bool simulated) {
  if (ranks < 1) throw UsageError(str("a group needs at least one rank, not ", ranks));
  if (nodes < 1 || ranks % nodes != 0) {
    throw UsageError(
        str("nodes = ", nodes, ", must divide the ", counted(ranks, "rank"), " into nodes of equal size"));
  }
  std::vector<int> labels;
  for (int rank = 0; rank < ranks; ++rank) labels.push_back(rank / (ranks / nodes));
  return Topology(labels, simulated);
}

}  // namespace ferry
