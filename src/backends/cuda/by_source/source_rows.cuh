// A dispatch result by source: the source of each received row, the check of a caller's counts, and the plan
// of the way back from both.
#pragma once

#include "backends/cuda/by_source/source_rows.hpp"
#include "backends/cuda/device/routing_tables.hpp"
#include "backends/cuda/protocol/plan_header.cuh"
#include "layout/plan_layout.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

inline constexpr int kSourceThreads = 512;

__device__ __forceinline__ std::int64_t thread_of_grid() {
  return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ std::int64_t threads_of_grid() {
  return std::int64_t{gridDim.x} * blockDim.x;
}

__device__ __forceinline__ std::int64_t id_of(const Ids& ids, std::int64_t route) {
  return ids.type == IdType::int64 ? static_cast<const std::int64_t*>(ids.data)[route]
                                   : static_cast<const std::int32_t*>(ids.data)[route];
}

// N, which may be known on the device only. The dispatch has reported an N that is out of range; it counts as
// 0.
__device__ __forceinline__ std::int64_t kept_token_count(std::int64_t most,
                                                         const std::int32_t* device_count) {
  if (device_count == nullptr) return most;
  const std::int64_t tokens = *device_count;
  return tokens >= 0 && tokens <= most ? tokens : 0;
}

// [grid] Copies the dispatch's ids.
__device__ inline void keep_ids(const KeepIdsArguments& arguments) {
  const KeepIdsCall& call = arguments.call;
  const std::int64_t tokens = kept_token_count(call.tokens, call.device_count);
  for (std::int64_t route = thread_of_grid(); route < tokens * arguments.lane.top_k;
       route += threads_of_grid())
    call.kept_ids[route] = id_of(call.ids, route);
  if (thread_of_grid() == 0) *call.kept_tokens = static_cast<std::int32_t>(tokens);
}

// [warp] Lists the groups that have rows, in order.
__device__ inline void describe_groups(const DescribeRowsArguments& arguments, std::int64_t total) {
  const DescribeRowsCall& call = arguments.call;
  const int groups = arguments.lane.groups, thread = static_cast<int>(threadIdx.x % 32);
  int number = 0;
  std::int32_t most = 0;
  for (int first = 0; first < groups; first += 32) {
    const int group = first + thread;
    const std::int32_t count = group < groups && total > 0 ? call.received.counts[group] : 0;
    const std::uint32_t filled = __ballot_sync(~0u, count > 0);
    if (count > 0) {
      const int index = number + __popc(static_cast<int>(filled & ((1u << thread) - 1)));
      call.expert_ids[index] = group;
      call.row_offsets[index] = static_cast<std::uint32_t>(call.received.row_offsets[group]);
    }
    number += __popc(static_cast<int>(filled));
    for (int i = 0; i < 32; ++i) most = ::max(most, static_cast<std::int32_t>(__shfl_sync(~0u, count, i)));
  }
  for (int i = number + thread; i <= groups; i += 32) {
    call.row_offsets[i] = static_cast<std::uint32_t>(total);
    if (i < groups) call.expert_ids[i] = -1;
  }
  if (thread != 0) return;
  call.expert_usage_stats[0] = static_cast<std::uint32_t>(most);
  call.expert_usage_stats[1] = static_cast<std::uint32_t>(number);
}

// [grid] Fills the arrays.
__device__ inline void describe_rows(const DescribeRowsArguments& arguments) {
  const DescribeRowsCall& call = arguments.call;
  const LaneView& lane = arguments.lane;
  // An aborted dispatch has no rows.
  const bool usable = check_plan(lane, *arguments.plan.header, -1) == PlanFault::none;
  const std::int64_t total = usable ? *call.received.total : 0;
  if (blockIdx.x == 0 && threadIdx.x < 32) describe_groups(arguments, total);
  for (std::int64_t i = thread_of_grid(); i < std::int64_t{lane.groups} * lane.ranks;
       i += threads_of_grid()) {
    const auto group = static_cast<int>(i / lane.ranks), source = static_cast<int>(i % lane.ranks);
    std::int32_t count = 0;
    if (usable && group < lane.shared_experts) {
      count = source == lane.rank ? call.received.counts[group] : 0;
    } else if (usable && call.received.group_expert[group] >= 0) {
      count = arguments.plan.counts[std::int64_t{source} * lane.experts + call.received.group_expert[group]];
    }
    call.counts[i] = count;
  }
  for (std::int64_t row = thread_of_grid(); row < total; row += threads_of_grid()) {
    const Source source = call.received.source[row];
    call.src_info[2 * row] = source.token;
    call.src_info[2 * row + 1] = source.slot;
  }
}

inline constexpr int kReturnThreads = 1024;

// Faults are ordered as the host checks them, and the lowest key is reported. `index`: of the row, the route
// or the entry.
__device__ __forceinline__ unsigned long long fault_key(SourceFault fault, std::int64_t index) {
  // Faults of rows are ordered by their rows.
  const auto kind = static_cast<std::uint64_t>(fault);
  const bool of_row = fault == SourceFault::shared_row || fault == SourceFault::other_expert;
  const std::uint64_t stage = of_row ? static_cast<std::uint64_t>(SourceFault::info) : kind;
  return stage << 56 | static_cast<std::uint64_t>(index) << 8 | kind;
}
__device__ __forceinline__ void record_fault(ReturnState* state, SourceFault fault, std::int64_t index) {
  atomicMax(&state->fault, ~fault_key(fault, index));
}

__device__ __forceinline__ std::int64_t returned_tokens(const PlanReturnArguments& arguments) {
  const PlanReturnCall& call = arguments.call;
  const std::int64_t tokens = call.device_tokens != nullptr ? *call.device_tokens : call.tokens;
  return tokens >= 0 && tokens <= arguments.lane.max_tokens ? tokens : 0;
}

// [block] Checks counts and row_offsets, and finds where the rows of each group and source begin. A single
// block.
class CountChecker {
 public:
  __device__ explicit CountChecker(const PlanReturnArguments& arguments)
      : arguments_(arguments),
        rows_(arguments.rows(returned_tokens(arguments))),
        lane_(arguments.lane),
        call_(arguments.call),
        state_(arguments.state()) {}

  __device__ void run() {
    const std::int64_t given = call_.device_tokens != nullptr ? *call_.device_tokens : call_.tokens;
    if (threadIdx.x == 0 && rows_.tokens != given) record_fault(state_, SourceFault::tokens, 0);
    bool wrong = rows_.tokens != given;
    for (int i = static_cast<int>(threadIdx.x); i < lane_.groups * lane_.ranks; i += kReturnThreads)
      wrong = wrong_count(i) || wrong;
    if (__syncthreads_or(wrong) != 0) return end(0);
    if (threadIdx.x < 32) place_groups();
    __syncthreads();
    const std::int64_t rows = arguments_.group_first()[lane_.groups];
    if (rows > lane_.capacity_rows) {
      if (threadIdx.x == 0) record_fault(state_, SourceFault::capacity, 0);
      return end(0);
    }
    wrong = threadIdx.x < 32 && offsets_differ();
    if (__syncthreads_or(wrong) != 0) return end(0);
    place_segments();
    end(rows);
  }

 private:
  // Records and returns whether the count of group i / R from source i % R is out of range.
  __device__ bool wrong_count(int i) const {
    const SourceFault fault = rows_.fault_of_count(i);
    if (fault != SourceFault::none) record_fault(state_, fault, i);
    return fault != SourceFault::none;
  }

  // [warp] Prefix sum: first row of each group. A sum beyond the capacity is kept at capacity + 1.
  __device__ void place_groups() const {
    const int thread = static_cast<int>(threadIdx.x);
    std::int64_t before = 0;
    for (int first = 0; first < lane_.groups; first += 32) {
      const int group = first + thread;
      const std::int64_t limit = lane_.capacity_rows + 1;
      std::int64_t mine = 0;
      if (group < lane_.groups) mine = ::min(limit, align(::min(limit, rows_.rows_of_group(group))));
      std::int64_t sum = mine;
      for (int step = 1; step < 32; step *= 2) {
        const std::int64_t lower =
            __shfl_sync(~0u, static_cast<long long>(sum), thread >= step ? thread - step : thread);
        if (thread >= step) sum += lower;
      }
      if (group < lane_.groups)
        arguments_.group_first()[group] = static_cast<std::int32_t>(::min(limit, before + sum - mine));
      const std::int64_t all = __shfl_sync(~0u, static_cast<long long>(sum), 31);
      before = ::min(limit, before + all);
    }
    if (thread == 0) arguments_.group_first()[lane_.groups] = static_cast<std::int32_t>(before);
  }
  __device__ std::int64_t align(std::int64_t rows) const {
    return lane_.by_alignment.round_up(static_cast<std::int32_t>(rows));
  }

  // [warp] Whether this thread has found an entry of row_offsets that contradicts the counts.
  __device__ bool offsets_differ() const {
    const int thread = static_cast<int>(threadIdx.x);
    const std::int32_t* const first_row = arguments_.group_first();
    int number = 0;
    bool wrong = false;
    const auto compare = [&](int index, std::int32_t expected) {
      if (call_.row_offsets[index] == static_cast<std::uint32_t>(expected)) return;
      record_fault(state_, SourceFault::row_offsets, index);
      wrong = true;
    };
    for (int first = 0; first < lane_.groups; first += 32) {
      const int group = first + thread;
      const bool filled = group < lane_.groups && rows_.rows_of_group(group) > 0;
      const std::uint32_t all = __ballot_sync(~0u, filled);
      if (filled) compare(number + __popc(static_cast<int>(all & ((1u << thread) - 1))), first_row[group]);
      number += __popc(static_cast<int>(all));
    }
    if (thread == 0) compare(number, first_row[lane_.groups]);
    return wrong;
  }

  __device__ void place_segments() const {
    for (int group = static_cast<int>(threadIdx.x); group < lane_.groups; group += kReturnThreads) {
      std::int32_t row = arguments_.group_first()[group];
      for (int source = 0; source < lane_.ranks; ++source) {
        arguments_.segment_first()[group * lane_.ranks + source] = row;
        row += call_.counts[group * lane_.ranks + source];
      }
    }
  }

  __device__ void end(std::int64_t rows) const {
    if (threadIdx.x != 0) return;
    state_->rows = rows;
    state_->tokens = static_cast<std::int32_t>(rows_.tokens);
  }

  const PlanReturnArguments& arguments_;
  const ReturnedRows<LaneView> rows_;
  const LaneView& lane_;
  const PlanReturnCall& call_;
  ReturnState* const state_;
};

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
    plan.received_position[i] = 0;  // used by sums only, which are of replicated tokens
  }
  for (std::int64_t i = thread_of_grid(); i < std::int64_t{lane.ranks} * lane.ranks; i += threads_of_grid())
    plan.tokens_between[i] = 0;
  const ReturnTables tables(lane);
  const std::int64_t routes = returned_tokens(arguments) * lane.top_k;
  for (std::int64_t route = thread_of_grid(); route < routes; route += threads_of_grid()) {
    const std::int64_t id = id_of(arguments.call.ids, route);
    int rank = id >= 0 && id < lane.experts ? tables.rank_of(id) : -1;  // the dispatch has reported other ids
    if (!keeps_route(lane.input, rank, lane.rank)) rank = -1;
    plan.route_expert[route] = rank >= 0 ? static_cast<std::int32_t>(id) : -1;
    plan.route_rank[route] = rank;
    plan.route_row[route] = rank < 0 || rank == lane.rank ? -1 : kRowOfPeer;
  }
  if (lane.input != Input::replicated) return;
  // Weights travel to the rows with the messages, which here are this rank's own.
  std::int32_t* const sent = plan.sent_tokens + std::int64_t{lane.rank} * lane.max_tokens;
  for (std::int64_t i = thread_of_grid(); i < lane.max_tokens; i += threads_of_grid())
    sent[i] = static_cast<std::int32_t>(i);
  const std::int64_t places = std::int64_t{lane.max_tokens} * lane.most_ranks;
  for (std::int64_t i = thread_of_grid(); i < places; i += threads_of_grid()) plan.token_ranks[i] = -1;
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
    if (lane.input == Input::replicated)
      plan.token_ranks[std::int64_t{row.token} * lane.most_ranks] = lane.rank;
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
    write_plan_header(plan.header, lane_, *lane_.epoch, 0, {state_.tokens, state_.rows, 0});
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

// The kernels of plan_return(), one after the other. In the first, one block checks the counts.
__device__ inline void start_return(const PlanReturnArguments& arguments) {
  clear_return(arguments);
  if (blockIdx.x == 0) CountChecker(arguments).run();
}
__device__ inline void finish_return(const PlanReturnArguments& arguments) {
  ReturnFinisher(arguments).run();
}

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
