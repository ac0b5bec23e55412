// Combine by source on GPUs (src/max): kernels that make MAX's arrays of a dispatch, and from them the plan
// of a combine. None of them waits for another rank.
//
// Message i of a source is its token i, whether the token has rows here or not. So no rows have to be sorted,
// and rows may be in any order.
#pragma once

#include "backends/cuda/device/routing_tables.hpp"
#include "backends/cuda/protocol/lane_view.hpp"
#include "backends/cuda/runtime/launch.hpp"
#include "exchange/source_operations.hpp"

namespace ferry::cuda {

// State that the kernels of a combine share, in device memory that starts as zeros.
struct ReturnState {
  unsigned long long fault;  // the highest ~fault_key() so far; 0: none
  std::int64_t rows;         // padding included; 0 after a fault of the counts
  std::int32_t tokens;       // N
};
// Offsets in PlanReturnCall::scratch: a ReturnState, then int32 [groups + 1] first row of each group, then
// [groups * R + 1] of each group and source rank.
inline constexpr std::int64_t kReturnStateBytes = 64;
inline std::int64_t return_scratch_bytes(const LaneView& lane) {
  return kReturnStateBytes + 4 * (std::int64_t{lane.groups} + 1) +
         4 * (std::int64_t{lane.groups} * lane.ranks + 1);
}

struct KeepIdsArguments {
  LaneView lane;
  KeepIdsCall call;
};

struct DescribeRowsArguments {
  LaneView lane;
  PlanView plan;
  DescribeRowsCall call;
};

struct PlanReturnArguments {
  LaneView lane;
  PlanView plan;
  PlanReturnCall call;

  FERRY_HD ReturnState* state() const { return reinterpret_cast<ReturnState*>(call.scratch); }
  FERRY_HD std::int32_t* group_first() const {
    return reinterpret_cast<std::int32_t*>(call.scratch + kReturnStateBytes);
  }
  FERRY_HD std::int32_t* segment_first() const { return group_first() + lane.groups + 1; }
  FERRY_HD ReturnedRows<LaneView> rows(std::int64_t tokens) const {
    const RoutingTables tables =
        RoutingTables::at(const_cast<std::byte*>(lane.tables), lane.experts, lane.ranks);
    const std::int32_t experts = tables.first_physical[lane.rank + 1] - tables.first_physical[lane.rank];
    return {lane, call, tokens, experts, group_first(), segment_first(), plan.route_expert};
  }
};
void launch_plan_return(const PlanReturnArguments& arguments, int blocks, Stream stream);

struct CheckReturnedArguments {
  LaneView lane;
  PlanView plan;
  const float* returned;
};

extern const Kernel<KeepIdsArguments> kKeepIdsKernel;
extern const Kernel<DescribeRowsArguments> kDescribeRowsKernel;
extern const Kernel<CheckReturnedArguments> kCheckReturnedKernel;

}  // namespace ferry::cuda
