// Makes the plan of a combine from src_info, row_offsets, counts and the rank's ids, in three launches:
// clear_return() and check_counts(), place_rows(), finish_return().
#pragma once

#include "backends/cuda/by_source/count_checker.cuh"
#include "backends/cuda/device/routing_tables.hpp"
#include "layout/plan_layout.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

// The combine's number and the row's expert as a value that travels with the row; neither NaN nor 0.
__device__ __forceinline__ float tag_of_row(std::uint64_t combine, std::int32_t expert) {
  constexpr std::uint64_t kNumbers = 2039;  // below it the exponent is not all ones
  constexpr int kExpertBits = 20;
  return float_of(static_cast<std::uint32_t>((combine % kNumbers + 1) << kExpertBits) |
                  static_cast<std::uint32_t>(expert));
}

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

// A row of MAX's arrays. `source`: -1 for padding.
struct ReturnedRow {
  int group, source;
  std::int32_t token, slot;
  std::int32_t position;  // among the rows of its group from its source
};

// Finds a row's segment, which is the last one that begins at `row` or before, unless the row is padding.
__device__ inline ReturnedRow returned_row(const PlanReturnArguments& arguments, std::int64_t row) {
  const LaneView& lane = arguments.lane;
  const std::int32_t* const first = arguments.segment_first();
  int low = 0, high = lane.groups * lane.ranks;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  ReturnedRow found{low / lane.ranks, low % lane.ranks, arguments.call.src_info[2 * row],
                    arguments.call.src_info[2 * row + 1], static_cast<std::int32_t>(row - first[low])};
  if (found.position >= arguments.call.counts[low]) found.source = -1;
  return found;
}

// The fault of a row by itself; `none` if it has none.
__device__ inline SourceFault fault_of_row(const PlanReturnArguments& arguments, const ReturnedRow& row,
                                           std::int32_t expert) {
  const LaneView& lane = arguments.lane;
  if (row.group < lane.shared_experts) {
    return row.token == row.position && row.slot == lane.top_k + row.group ? SourceFault::none
                                                                           : SourceFault::shared_row;
  }
  const bool own = row.source == lane.rank;
  const std::int32_t most = own ? arguments.state()->tokens : lane.max_tokens;
  if (row.token < 0 || row.token >= most || row.slot < 0 || row.slot >= lane.top_k) return SourceFault::info;
  const std::int64_t route = std::int64_t{row.token} * lane.top_k + row.slot;
  return own && arguments.plan.route_expert[route] != expert ? SourceFault::other_expert : SourceFault::none;
}

// [grid] Records every row where the combine looks it up.
__device__ inline void place_rows(const PlanReturnArguments& arguments) {
  const LaneView& lane = arguments.lane;
  const PlanView& plan = arguments.plan;
  ReturnState* const state = arguments.state();
  const ReturnTables tables(lane);
  const std::uint64_t number = lane.state->calls[0] + 1;
  for (std::int64_t at = thread_of_grid(); at < state->rows; at += threads_of_grid()) {
    const ReturnedRow row = returned_row(arguments, at);
    arguments.call.row_tags[at] = 0;
    if (row.source < 0) continue;
    const std::int32_t expert = row.group < lane.shared_experts ? -1 : tables.expert_of_group(row.group);
    const SourceFault fault = fault_of_row(arguments, row, expert);
    if (fault != SourceFault::none) record_fault(state, fault, at);
    if (fault != SourceFault::none || row.group < lane.shared_experts) continue;
    const std::int64_t message = std::int64_t{row.source} * lane.max_tokens + row.token;
    const auto mine = static_cast<std::int32_t>(at);
    const std::int32_t other =
        atomicMax(&plan.received_rows_of_message[message * lane.top_k + row.slot], mine);
    if (other != -1) record_fault(state, SourceFault::twice, ::max(other, mine));
    atomicMax(&plan.tokens_between[std::int64_t{row.source} * lane.ranks + lane.rank], row.token + 1);
    if (row.source == lane.rank) plan.route_row[std::int64_t{row.token} * lane.top_k + row.slot] = mine;
    arguments.call.row_tags[at] = tag_of_row(number, expert);
  }
}

// [block] A single block: looks for rows that this rank's ids have and src_info lacks, reports the first
// fault, and completes the plan's header.
class ReturnFinisher {
 public:
  __device__ explicit ReturnFinisher(const PlanReturnArguments& arguments)
      : arguments_(arguments), lane_(arguments.lane), call_(arguments.call), state_(*arguments.state()) {}

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
    int peer = -1;
    std::int64_t limit = 0;
    std::int32_t a = static_cast<std::int32_t>(index), b = 0, c = 0, d = 0;
    const auto entry = static_cast<int>(index);
    switch (fault) {
      case SourceFault::tokens:
        a = call_.device_tokens != nullptr ? *call_.device_tokens : static_cast<std::int32_t>(call_.tokens);
        b = lane_.max_tokens;
        break;
      case SourceFault::counts:
      case SourceFault::shared_counts:
        a = entry / lane_.ranks;
        b = entry % lane_.ranks;
        c = call_.counts[entry];
        limit = state_.tokens;
        d = fault == SourceFault::counts ? lane_.max_tokens * lane_.top_k
            : b == lane_.rank            ? state_.tokens
                                         : 0;
        break;
      case SourceFault::capacity:
        a = arguments_.group_first()[lane_.groups];
        b = static_cast<std::int32_t>(lane_.capacity_rows);
        break;
      case SourceFault::row_offsets:
        b = static_cast<std::int32_t>(call_.row_offsets[entry]);
        c = expected_offset(entry);
        break;
      case SourceFault::missing:
        a = arguments_.plan.route_expert[index];
        c = entry / lane_.top_k;
        d = entry % lane_.top_k;
        break;
      default:
        describe_row(fault, index, &peer, &limit, &b, &c, &d);
    }
    abort_call(lane_, lane_.state->calls[0] + 1, Operation::combine, DeviceError::Reason::source, peer,
               static_cast<int>(fault) | static_cast<int>(limit << kSourceFaultBits),
               static_cast<std::int64_t>(a) << 32 | static_cast<std::uint32_t>(b),
               static_cast<std::int64_t>(c) << 32 | static_cast<std::uint32_t>(d));
  }

  __device__ std::int32_t expected_offset(int index) const {
    for (int group = 0; group < lane_.groups; ++group) {
      bool filled = false;
      for (int source = 0; source < lane_.ranks; ++source)
        filled = filled || call_.counts[group * lane_.ranks + source] > 0;
      if (filled && index-- == 0) return arguments_.group_first()[group];
    }
    return arguments_.group_first()[lane_.groups];
  }

  __device__ void describe_row(SourceFault fault, std::int64_t at, int* peer, std::int64_t* limit,
                               std::int32_t* b, std::int32_t* c, std::int32_t* d) const {
    const ReturnedRow row = returned_row(arguments_, at);
    *peer = row.source;
    *c = row.token;
    *d = row.slot;
    if (fault == SourceFault::shared_row) {
      *limit = row.position;
      *b = lane_.top_k + row.group;
    } else if (fault == SourceFault::info) {
      *limit = row.source == lane_.rank ? state_.tokens : lane_.max_tokens;
      *b = lane_.top_k;
    } else if (fault == SourceFault::other_expert) {
      *b = ReturnTables(lane_).expert_of_group(row.group);
    } else {
      *b = static_cast<std::int32_t>(other_row(row, at));
    }
  }

  // The first row of the same token and slot.
  __device__ std::int64_t other_row(const ReturnedRow& row, std::int64_t at) const {
    for (std::int64_t other = 0; other < at; ++other) {
      if (call_.src_info[2 * other] != row.token || call_.src_info[2 * other + 1] != row.slot) continue;
      if (returned_row(arguments_, other).source == row.source) return other;
    }
    return at;
  }

  const PlanReturnArguments& arguments_;
  const LaneView& lane_;
  const PlanReturnCall& call_;
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
    const float expected = tag_of_row(number, arguments.plan.route_expert[route]);
    if (bits_of(arguments.returned[route]) != bits_of(expected))
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
