// Makes the plan of a combine from src_info, row_offsets, counts and the rank's ids, in three launches:
// clear_return() and check_counts(), place_rows(), finish_return().
#pragma once

#include "backends/cuda/by_source/count_checker.cuh"
#include "backends/cuda/device/routing_tables.hpp"
#include "layout/plan_layout.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

struct ReturnTables {
  const LaneView& lane;
  RoutingTables routing;

  __device__ explicit ReturnTables(const LaneView& view)
      : lane(view),
        routing(RoutingTables::at(const_cast<std::byte*>(view.tables), view.experts, view.ranks)) {}

  __device__ int rank_of(std::int64_t expert) const { return routing.rank_of[routing.physical_of[expert]]; }
  // The routed expert of a group of this rank.
  __device__ std::int32_t expert_of_group(int group) const {
    return routing.expert_of[routing.first_physical[lane.rank] + group - lane.shared_experts];
  }
};

// [grid] Writes the parts of the plan that do not depend on the rows.
__device__ inline void clear_return(const PlanReturnArguments& arguments) {
  const LaneView& lane = arguments.lane;
  const PlanView& plan = arguments.plan;
  const std::int64_t messages = std::int64_t{lane.ranks} * lane.max_tokens;
  for (std::int64_t i = thread_of_grid(); i < messages * lane.top_k; i += threads_of_grid())
    plan.received_rows_of_message[i] = -1;
  for (std::int64_t i = thread_of_grid(); i < messages; i += threads_of_grid()) {
    plan.received_token[i] = static_cast<std::int32_t>(i % lane.max_tokens);
    plan.received_position[i] = 0;  // used by sums only
  }
  for (std::int64_t i = thread_of_grid(); i < std::int64_t{lane.ranks} * lane.ranks; i += threads_of_grid())
    plan.tokens_between[i] = 0;
  const ReturnTables tables(lane);
  const std::int64_t routes = returned_tokens(arguments) * lane.top_k;
  for (std::int64_t route = thread_of_grid(); route < routes; route += threads_of_grid()) {
    const std::int64_t id = id_of(arguments.call.ids, route);
    const bool expert = id >= 0 && id < lane.experts;  // the dispatch has reported other ids
    const int rank = expert ? tables.rank_of(id) : -1;
    plan.route_expert[route] = expert ? static_cast<std::int32_t>(id) : -1;
    plan.route_rank[route] = rank;
    plan.route_row[route] = rank < 0 || rank == lane.rank ? -1 : kRowOfPeer;
  }
}

// [grid] Records every row where the combine looks it up.
__device__ inline void place_rows(const PlanReturnArguments& arguments) {
  const LaneView& lane = arguments.lane;
  const PlanView& plan = arguments.plan;
  ReturnState* const state = arguments.state();
  const ReturnTables tables(lane);
  const ReturnedRows<LaneView> rows = arguments.rows(state->tokens);
  const std::uint64_t number = lane.state->calls[0] + 1;
  for (std::int64_t at = thread_of_grid(); at < state->rows; at += threads_of_grid()) {
    const ReturnedRow row = rows.row(at);
    arguments.call.row_tags[at] = 0;
    if (row.source < 0) continue;
    const std::int32_t expert = row.group < lane.shared_experts ? -1 : tables.expert_of_group(row.group);
    const SourceFault fault = rows.fault_of_row(row, expert);
    if (fault != SourceFault::none) record_fault(state, fault, at);
    if (fault != SourceFault::none || row.group < lane.shared_experts) continue;
    const std::int64_t message = std::int64_t{row.source} * lane.max_tokens + row.token;
    const auto mine = static_cast<std::int32_t>(at);
    const std::int32_t other =
        atomicMax(&plan.received_rows_of_message[message * lane.top_k + row.slot], mine);
    if (other != -1) record_fault(state, SourceFault::twice, ::max(other, mine));
    atomicMax(&plan.tokens_between[std::int64_t{row.source} * lane.ranks + lane.rank], row.token + 1);
    if (row.source == lane.rank) plan.route_row[std::int64_t{row.token} * lane.top_k + row.slot] = mine;
    arguments.call.row_tags[at] = float_of(return_tag(number, expert));
  }
}

// [block] A single block: looks for rows that this rank's ids have and src_info lacks, reports the first
// fault, and completes the plan's header.
class ReturnFinisher {
 public:
  __device__ explicit ReturnFinisher(const PlanReturnArguments& arguments)
      : arguments_(arguments), lane_(arguments.lane), state_(*arguments.state()) {}

  __device__ void run() {
    const PlanView& plan = arguments_.plan;
    if (state_.fault == 0) {
      const std::int64_t routes = std::int64_t{state_.tokens} * lane_.top_k;
      for (std::int64_t route = threadIdx.x; route < routes; route += kReturnThreads) {
        if (plan.route_rank[route] == lane_.rank && plan.route_row[route] < 0)
          record_fault(&state_, SourceFault::missing, route);
      }
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (state_.fault != 0) {
      const unsigned long long key = ~state_.fault;
      report(static_cast<SourceFault>(key & 0xff), static_cast<std::int64_t>(key >> 8 & 0xffff'ffff'ffff));
    }
    write_plan_header(plan.header, lane_, 0, state_.tokens, state_.rows, 0);
    if (state_.fault != 0) plan.header->magic = kWrongArraysMagic;
    state_.fault = 0;
  }

 private:
  // [thread] Reports a fault to the host, with its numbers.
  __device__ void report(SourceFault fault, std::int64_t index) const {
    const ReturnTables tables(lane_);
    const SourceFaultNumbers n = arguments_.rows(state_.tokens).numbers_of(fault, index, [&](int group) {
      return tables.expert_of_group(group);
    });
    abort_call(lane_, lane_.state->calls[0] + 1, Operation::combine, DeviceError::Reason::source, n.peer,
               static_cast<int>(fault) | static_cast<int>(n.limit << kSourceFaultBits),
               n.a << 32 | static_cast<std::uint32_t>(n.b), n.c << 32 | static_cast<std::uint32_t>(n.d));
  }

  const PlanReturnArguments& arguments_;
  const LaneView& lane_;
  ReturnState& state_;
};

// [block] A single block, after the combine. `first`: in shared memory.
__device__ inline void check_returned(const CheckReturnedArguments& arguments, unsigned long long* first) {
  const LaneView& lane = arguments.lane;
  const PlanHeader& header = *arguments.plan.header;
  if (threadIdx.x == 0) *first = ~0ull;
  __syncthreads();
  const std::uint64_t number = lane.state->calls[0];
  if (check_plan(lane, header, -1) != PlanFault::none || is_aborted(lane, number)) return;
  const std::int64_t routes = std::int64_t{header.tokens} * lane.top_k;
  for (std::int64_t route = threadIdx.x; route < routes; route += kReturnThreads) {
    if (arguments.plan.route_rank[route] < 0) continue;
    if (bits_of(arguments.returned[route]) != return_tag(number, arguments.plan.route_expert[route]))
      atomicMin(first, static_cast<unsigned long long>(route));
  }
  __syncthreads();
  if (threadIdx.x != 0 || *first == ~0ull) return;
  const auto route = static_cast<std::int64_t>(*first);
  const std::int64_t token = route / lane.top_k, slot = route % lane.top_k;
  abort_call(lane, number, Operation::combine, DeviceError::Reason::source, arguments.plan.route_rank[route],
             static_cast<int>(SourceFault::not_returned),
             static_cast<std::int64_t>(arguments.plan.route_expert[route]) << 32,
             token << 32 | static_cast<std::uint32_t>(slot));
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
