// ReductionLevel::node over an engine: between the transfer of packed rows and the reducers, which then add
// one row for each node of a token instead of one for each rank.
#pragma once

#include <cuda_runtime_api.h>

#include "backends/cuda/combine/combine.hpp"

namespace ferry::cuda {

struct AddOnNodesArguments {
  LaneView lane;
  PlanView plan;
  std::int32_t node_of[kMaxDeviceRanks];
  DType combine_type;
  CombineRowLayout row;
  bool has_rows, has_values;  // contents of rows: values of a token's columns, values of its routes
  bool relays_add;            // rows from other nodes are sums already (relay_sums.hpp)
  LLPacket* arrived;          // see PackedRows. In: of a row for each rank. Out: of a row for each node
  // Out: replace the plan's arrays. They name only the lowest of a token's ranks on each node.
  std::int32_t* token_ranks;  // [T, P]
  std::int32_t* route_rank;   // [T, K]
};

// Adds the rows of a token that come from one node, in ascending order of its ranks. The sum, rounded to the
// combine type, replaces the first of them; the sums are in the order of the nodes. The rows of a token stay
// unchanged if one of them is missing or its plan has an impossible rank: the reducers report that.
void launch_add_on_nodes(const AddOnNodesArguments& arguments, cudaStream_t stream);

void prepare_node_sums();  // loads the kernels on the current device

}  // namespace ferry::cuda
