// Which messages share a block in two hops: the tables in the blocks of a call have an entry for each of
// them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backends/cpu/link/peer_link.hpp"
#include "ferry/error.hpp"
#include "ferry/topology.hpp"

namespace ferry::collective {

// Bytes of the table in the block to each rank and from each rank. [R], or empty: no tables.
struct TableBytes {
  std::vector<std::int64_t> sent, received;

  std::int64_t sent_to(int peer) const { return sent.empty() ? 0 : sent[static_cast<std::size_t>(peer)]; }
  std::int64_t received_from(int peer) const {
    return received.empty() ? 0 : received[static_cast<std::size_t>(peer)];
  }
};

// Where messages from rank `from` to rank `to` go in the first hop: to their relay, or straight there.
int first_stop(const Topology& topology, cpu::Direction direction, int from, int to);
// The relay that passes on what rank `from` sends to rank `to`; -1 if it goes there straight.
int relay_between(const Topology& topology, cpu::Direction direction, int from, int to);
// True if rank `relay` forwards messages of other ranks to rank `to`.
bool is_relay(const Topology& topology, cpu::Direction direction, int relay, int to);
// The role of rank `me`, in a transfer of messages in two hops, that a wait for `peer` names (-1: not known).
WaitRole role_towards(const Topology& topology, cpu::Direction direction, bool in_second_hop, int peer,
                      int me);

// An entry is a number of bytes. Sender and receiver know from the topology which ranks the entries of a
// block stand for, so a rank's tables have at most 2 R entries in each direction.
class HopTables {
 public:
  // The tables of `rank`.
  HopTables(const Topology& topology, int rank);

  // In the first hop: the ranks that the messages in the block from `from` to `to` are for, ascending. One of
  // the two is this rank.
  std::span<const int> receivers(cpu::Direction direction, int from, int to) const;
  // In the second hop: the ranks that the messages in the block from `relay` to `to` are from, ascending.
  std::span<const int> origins(cpu::Direction direction, int relay, int to) const;

  // Enough for either direction.
  TableBytes first_hop() const { return {bytes_to_, bytes_from_}; }
  TableBytes second_hop() const { return {bytes_from_, bytes_to_}; }

 private:
  std::span<const int> behind(int rank) const;
  std::span<const int> ranks_behind_relay(int source, int relay) const;

  const Topology topology_;
  const int me_, node_;
  // By local rank: a rank of this node, and the ranks of other nodes whose relay it is.
  std::vector<std::vector<int>> behind_;
  std::vector<std::int64_t> bytes_to_, bytes_from_;  // [R] of the first hop
};

}  // namespace ferry::collective
