// Which ranks of a group are on which node.
#pragma once

#include <cstddef>
#include <vector>

namespace ferry {

/// The nodes of a group: sets of ranks that share memory. Nodes may differ in size, and the ranks of a node
/// need not be consecutive. Nodes are numbered in the order of their lowest ranks, the local ranks of a node
/// in rank order.
class Topology {
 public:
  /// Ranks with equal labels are on one node. `labels`: [R], R at least 1, any numbers. `simulated`: as
  /// simulated().
  explicit Topology(const std::vector<int>& labels, bool simulated = false);

  /// Nodes of equal size, each of consecutive ranks.
  /// @throws UsageError  `ranks` or `nodes` below 1, or `nodes` does not divide `ranks`
  static Topology blocks(int ranks, int nodes, bool simulated = false);

  int ranks() const { return static_cast<int>(node_of_.size()); }  ///< R
  int nodes() const { return static_cast<int>(ranks_of_.size()); }
  int node_of(int rank) const { return node_of_[static_cast<std::size_t>(rank)]; }
  int local_rank_of(int rank) const { return local_rank_of_[static_cast<std::size_t>(rank)]; }

  /// The ranks of a node, in increasing order.
  const std::vector<int>& ranks_of(int node) const { return ranks_of_[static_cast<std::size_t>(node)]; }

  /// The relay between rank `source` and another node: the rank of `node` that passes on what `source` and
  /// the ranks of `node` send each other in two hops (Config::hops), in both directions.
  int relay_of(int source, int node) const {
    const std::vector<int>& ranks = ranks_of(node);
    return ranks[static_cast<std::size_t>(local_rank_of(source)) % ranks.size()];
  }

  /// Whether nodes stand for hosts that the ranks do not really run on: the nodes were given as an argument,
  /// or by Bootstrap::host_id or FERRY_HOST_ID.
  bool simulated() const { return simulated_; }

  bool operator==(const Topology&) const = default;

 private:
  std::vector<int> node_of_, local_rank_of_;  // [ranks]
  std::vector<std::vector<int>> ranks_of_;    // [nodes]
  bool simulated_;
};

}  // namespace ferry
