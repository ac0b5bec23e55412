#include "backends/collective/hop_tables.hpp"

namespace ferry::collective {
namespace {

constexpr std::int64_t kEntryBytes = sizeof(std::int64_t);

}  // namespace

int first_stop(const Topology& topology, cpu::Direction direction, int from, int to) {
  if (topology.node_of(from) == topology.node_of(to)) return to;
  return direction == cpu::Direction::to_experts ? topology.relay_of(from, topology.node_of(to))
                                                 : topology.relay_of(to, topology.node_of(from));
}

int relay_between(const Topology& topology, cpu::Direction direction, int from, int to) {
  const int stop = first_stop(topology, direction, from, to);
  return stop == from || stop == to ? -1 : stop;
}

bool is_relay(const Topology& topology, cpu::Direction direction, int relay, int to) {
  const bool within_node = topology.node_of(relay) == topology.node_of(to);
  if (direction == cpu::Direction::to_experts) return within_node;
  return !within_node && topology.relay_of(to, topology.node_of(relay)) == relay;
}

WaitRole role_towards(const Topology& topology, cpu::Direction direction, bool in_second_hop, int peer,
                      int me) {
  if (in_second_hop) return WaitRole::receiver;
  if (peer < 0) return WaitRole::none;
  const bool within_node = topology.node_of(peer) == topology.node_of(me);
  if (direction == cpu::Direction::to_experts) {
    if (within_node) return WaitRole::receiver;
    return topology.relay_of(peer, topology.node_of(me)) == me ? WaitRole::relay : WaitRole::sender;
  }
  if (within_node) return WaitRole::relay;
  return topology.relay_of(me, topology.node_of(peer)) == peer ? WaitRole::receiver : WaitRole::sender;
}

HopTables::HopTables(const Topology& topology, int rank)
    : topology_(topology), me_(rank), node_(topology.node_of(rank)) {
  const std::vector<int>& node_ranks = topology_.ranks_of(node_);
  behind_.resize(node_ranks.size());
  for (int other = 0; other < topology_.ranks(); ++other) {
    const int stop = topology_.node_of(other) == node_ ? other : topology_.relay_of(other, node_);
    behind_[static_cast<std::size_t>(topology_.local_rank_of(stop))].push_back(other);
  }
  // Sized for the direction of a call that has more entries.
  const auto bytes = [&](int from, int to) {
    const std::span<const int> ranks =
        topology_.node_of(from) == topology_.node_of(to) ? behind(to) : ranks_behind_relay(from, to);
    return kEntryBytes * static_cast<std::int64_t>(ranks.size());
  };
  for (int peer = 0; peer < topology_.ranks(); ++peer) {
    bytes_to_.push_back(bytes(me_, peer));
    bytes_from_.push_back(bytes(peer, me_));
  }
}

// `rank`: a rank of this node.
std::span<const int> HopTables::behind(int rank) const {
  return behind_[static_cast<std::size_t>(topology_.local_rank_of(rank))];
}

// If `relay` is the relay on its node of `source`, which is on another node: the ranks of that node.
std::span<const int> HopTables::ranks_behind_relay(int source, int relay) const {
  const int node = topology_.node_of(relay);
  if (topology_.relay_of(source, node) != relay) return {};
  return topology_.ranks_of(node);
}

std::span<const int> HopTables::receivers(cpu::Direction direction, int from, int to) const {
  const bool within_node = topology_.node_of(from) == topology_.node_of(to);
  if (direction == cpu::Direction::to_sources) return within_node ? behind(to) : std::span<const int>();
  if (!within_node) return ranks_behind_relay(from, to);
  const std::vector<int>& ranks = topology_.ranks_of(node_);  // restricted to `to`
  return std::span(ranks).subspan(static_cast<std::size_t>(topology_.local_rank_of(to)), 1);
}

std::span<const int> HopTables::origins(cpu::Direction direction, int relay, int to) const {
  const bool within_node = topology_.node_of(relay) == topology_.node_of(to);
  if (direction == cpu::Direction::to_experts) return within_node ? behind(relay) : std::span<const int>();
  return within_node ? std::span<const int>() : ranks_behind_relay(to, relay);
}

}  // namespace ferry::collective
