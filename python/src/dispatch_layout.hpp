// Counts the routes of ids, for Python.
#pragma once

#include "arrays/framework.hpp"
#include "ferry/placement.hpp"
#include "ferry/topology.hpp"

namespace ferry::python {

// The types and shapes of what layout_of() returns, for callers that make many calls.
struct LayoutShapes {
  LayoutShapes(const Placement& placement, std::int64_t tokens)
      : tokens_per_rank(kInt32, {placement.ranks()}),
        routes_per_expert(kInt32, {placement.total_replicas()}),
        token_in_rank(kBool, {tokens, placement.ranks()}) {}

  TensorShape tokens_per_rank, routes_per_expert, token_in_rank;
};

struct PyDispatchLayout {
  nb::object tokens_per_rank, routes_per_expert, token_in_rank;
  nb::object tokens_per_node = nb::none();
};

// `ids`: a dense matrix of integers. `topology` null: without tokens_per_node. `source`: as in RankIds.
PyDispatchLayout layout_of(const Array& ids, const Placement& placement, const LayoutShapes& shapes,
                           const Topology* topology, Stream stream, int source = 0);

}  // namespace ferry::python
