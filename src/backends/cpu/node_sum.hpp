// The reduction level `node` of combine: the sums of a node's ranks are added before the source rank adds the
// nodes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/lane.hpp"

namespace ferry::cpu {

// out = the sum of a node's ranks for a token: `count` rows of the combine type, in rank order, are added in
// fp32 from +0 and rounded once to the combine type.
void sum_on_node(const CpuContext& context, void* out, const void* const* rows, int count, Store store);

// The rows of the combine type that a token's source rank adds: sums of ranks in rank order, or of nodes.
struct PartialSums {
  const void* rows[kMaxTopK];
  int nodes[kMaxTopK];  // the node that each row comes from
  int count = 0;

  void add(const void* row, int node) {
    rows[count] = row;
    nodes[count++] = node;
  }
};

// Replaces the rows of each node by their sum, and sorts the sums by node. `scratch` has count / 2 rows, one
// every `stride` bytes; the sums may lie there.
void add_within_nodes(const CpuContext& context, PartialSums& sums, std::byte* scratch, std::int64_t stride);

}  // namespace ferry::cpu
