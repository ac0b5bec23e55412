// Kernels for packed rows (PackedRows), between the phases of a combine whose rows an engine or the launch of
// two hops carries.
#pragma once

#include "backends/cuda/combine/combine.hpp"
#include "backends/cuda/protocol/lane_view.hpp"
#include "backends/cuda/runtime/launch.hpp"

namespace ferry::cuda {

struct PlaceRowsArguments {
  LaneView lane;
  PlanView plan;
  bool one_row;             // a message returns one row, a sum; otherwise one for each of its slots here
  std::int32_t* first_row;  // [R, T], out: see PackedRows
  std::int32_t* rows;       // [R], out
};

// The rows of one rank that have arrived.
struct ArrivedRows {
  const std::byte* rows;
  std::int64_t count;
};

struct FindRowsArguments {
  LaneView lane;
  ArrivedRows from[kMaxDeviceRanks];
  std::int32_t row_bytes, label_offset;
  LLPacket* arrived;  // out: see PackedRows
  std::int64_t most;  // entries of `arrived`
};

// ReductionLevel::node, between the transfer of packed rows and the reducers, which then add one row for each
// node of a token instead of one for each rank.
struct AddOnNodesArguments {
  LaneView lane;
  PlanView plan;
  std::int32_t node_of[kMaxDeviceRanks];
  DType combine_type;
  CombineRowLayout row;
  bool has_values;    // rows hold values of a token's routes, too
  bool relays_add;    // rows from other nodes are sums already (RelaySumsArguments)
  LLPacket* arrived;  // see PackedRows. In: of a row for each rank. Out: of a row for each node
  // Out: replace the plan's arrays. They name only the lowest of a token's ranks on each node.
  std::int32_t* token_ranks;  // [T, P]
  std::int32_t* route_rank;   // [T, K]
};

// Before rows are sent: finds where those for each source rank begin. With a damaged plan it counts the rows
// that the senders send, or none.
extern const Kernel<PlaceRowsArguments> kPlaceRowsKernel;

// After they have been transferred: records in `arrived` where each row has arrived, and sets its flags.
// Skips rows without a label of this call, which their sender has not written.
extern const Kernel<FindRowsArguments> kFindRowsKernel;

// Adds the rows of a token that come from one node, in ascending order of its ranks. The sum, rounded to the
// combine type, replaces the first of them; the sums are in the order of the nodes. The rows of a token stay
// unchanged if one of them is missing or its plan has an impossible rank: the reducers report that.
extern const Kernel<AddOnNodesArguments> kAddOnNodesKernel;

// A relay's part of ReductionLevel::node in two hops: it adds the rows that the ranks of its node send to one
// source rank on another node, and forwards one row for each token.
struct RelaySumsArguments {
  LaneView lane;
  DType combine_type;
  CombineRowLayout row;
  std::int32_t row_bytes, label_offset;
  int held;                           // ranks of the node whose rows are here
  ArrivedRows from[kMaxDeviceRanks];  // [held], in ascending order of the ranks
  std::int32_t* row_of;               // [T, held], working memory
  std::int32_t* place_of;             // [T], likewise
  std::byte* out;       // the sums, in the order of the tokens, each with the label of its first row
  std::int32_t* count;  // out, in pinned memory: number of sums
};

// Rows without a label of this call, which only a damaged plan causes, are left out.
void launch_relay_sums(const RelaySumsArguments& arguments, Stream stream);

}  // namespace ferry::cuda
