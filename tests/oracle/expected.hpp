// The expected step metadata, and the number of messages that a call sends between ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "ferry/exchange.hpp"
#include "oracle/row_positions.hpp"

namespace ferry::oracle {

// The result of Exchange::metadata on `rank`, from the counts of all ranks.
StepMetadata step_metadata(const std::vector<std::int32_t>& counts, int rank);

// How messages travel between nodes.
struct Travel {
  Topology topology;
  bool two_hops = false;
  bool relays_add = false;  // in two hops: ReductionLevel::node
};

// Messages that a rank sends to other ranks in a call, those that it forwards among them.
struct SentMessages {
  std::int64_t within_node = 0, between_nodes = 0;

  std::int64_t all() const { return within_node + between_nodes; }
};

// One for each (token, remote rank). Two hops: one for each (token, other node), and on the relay one for
// each (token, rank of its node) besides itself.
SentMessages dispatch_messages(const RowPositions& positions, const Travel& travel, int rank);

// partial: one for each token of another rank with a route here; otherwise one for each kept row of another
// rank. Two hops: rows for other nodes are also sent by the relay; partial with relays_add: one for each
// token of another node with a route on this one.
SentMessages combine_messages(const RowPositions& positions, const Travel& travel, int rank,
                              Reduction reduction);

}  // namespace ferry::oracle
