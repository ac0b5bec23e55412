#include "backends/cuda/two_hops/hop_call.hpp"

namespace ferry::cuda {

HopTopology HopTopology::of(const Topology& topology, int rank, Hops hops) {
  HopTopology of{};
  of.straight = hops == Hops::one;
  const int mine = topology.node_of(rank);
  for (int other = 0; other < topology.ranks(); ++other) {
    const int node = topology.node_of(other);
    const bool passes_no_relay = of.straight && node != mine;
    const auto i = static_cast<std::size_t>(other);
    if (of.straight || topology.ranks_of(node).size() == 1) of.alone.add(other);
    of.node[i] = static_cast<std::uint8_t>(node);
    of.local[i] = static_cast<std::uint8_t>(topology.local_rank_of(other));
    of.relay_there[i] = static_cast<std::uint8_t>(passes_no_relay ? other : topology.relay_of(rank, node));
    of.relay_here[i] = static_cast<std::uint8_t>(passes_no_relay ? rank : topology.relay_of(other, mine));
  }
  return of;
}

}  // namespace ferry::cuda
