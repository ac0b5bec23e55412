// The kernel of route_values and return_values: values of routes go to their rows, or those of rows back to
// their routes, with the messages of the dispatch that made the plan. For groups of any size.
#pragma once

#include "backends/cuda/operations/route_values.cuh"
#include "backends/cuda/operations/small_operations.hpp"
#include "backends/cuda/protocol/call_header.cuh"
#include "backends/cuda/protocol/plan_header.cuh"
#include "plan/slot.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

inline constexpr int kValueWarps = 8;
inline constexpr int kValueSendWarps = 4;

// [thread] Sets the values that no message brings to 0: those of padding rows and of shared experts' rows, or
// of masked slots.
__device__ inline void zero_unsent_values(const RouteValuesArguments& call, const PlanView& plan, int thread,
                                          int threads) {
  const std::int64_t routes = std::int64_t{plan.header->tokens} * call.lane.top_k;
  for (std::int64_t route = thread; route < routes && call.returns(); route += threads) {
    if (plan.route_rank[route] < 0) call.to[route] = 0;
  }
  for (std::int64_t row = thread; row < plan.header->total && !call.returns(); row += threads) {
    const Source source = plan.sources[row];
    if (source.rank < 0 || is_shared_slot(source.slot, call.lane.top_k)) call.to[row] = 0;
  }
}

// The messages of dispatch from this rank to each rank or, if `sent` is false, from each rank to this one, as
// in the plan.
__device__ inline PeerMessages messages_with(const LaneView& lane, const PlanView& plan, bool sent) {
  return {.lane = &lane, .tokens_between = plan.tokens_between, .sent = sent};
}

// [thread] The row here of this thread's slot in message `where`; -1: none.
__device__ inline std::int32_t received_row(const LaneView& lane, const PlanView& plan, std::int64_t where) {
  const int slot = threadIdx.x % 32;
  if (slot >= lane.top_k) return -1;
  const std::int32_t row = plan.received_rows_of_message[where * lane.top_k + slot];
  return row != -1 && valid_entry(lane, row, plan.header->total, where * lane.top_k + slot) ? row : -1;
}

// [warp] return_values: sends the values of each message's rows back to where the message came from.
__device__ inline void send_row_values(const RouteValuesArguments& call, std::uint64_t number,
                                       RouteValueIterator messages, const PlanView& plan) {
  const LaneView& lane = call.lane;
  const int slot = threadIdx.x % 32, parity = static_cast<int>(number & 1);
  int source;
  std::int32_t i;
  while (messages.next(&source, &i)) {
    inject_fault(lane, KernelPoint::route_values);
    const std::int32_t row = received_row(lane, plan, std::int64_t{source} * lane.max_tokens + i);
    if (slot >= lane.top_k) continue;
    const SlotMetadata metadata{.weight = row >= 0 ? call.from[row] : 0.0f};
    store_packet_relaxed_sys(memory::slot_metadata(lane, source, parity, lane.rank, i) + slot,
                             metadata.packet(number));
  }
}

// [thread] Stores the value that `rank` returns for this thread's slot in message `where`.
__device__ inline void store_returned(const RouteValuesArguments& call, const PlanView& plan, int rank,
                                      std::int64_t where, float value) {
  const int slot = threadIdx.x % 32;
  const std::int32_t token = plan.sent_tokens[where];
  if (token < 0 || token >= plan.header->tokens) {
    if (slot == 0) record_bad_source(call.lane, where);
    return;
  }
  const std::int64_t route = std::int64_t{token} * call.lane.top_k + slot;
  if (slot < call.lane.top_k && plan.route_rank[route] == rank) call.to[route] = value;
}

// [warp] Receives the values of the messages that fall to warp `worker` of `workers`.
__device__ inline void receive_values(const RouteValuesArguments& call, std::uint64_t number, int worker,
                                      int workers, const PlanView& plan) {
  const LaneView& lane = call.lane;
  const int slot = threadIdx.x % 32;
  RouteValueIterator partition(lane, messages_with(lane, plan, call.returns()), worker, workers);
  int peer;
  std::int32_t i;
  while (partition.next(&peer, &i)) {
    const std::int64_t where = std::int64_t{peer} * lane.max_tokens + i;
    float value = 0;
    const WaitResult result =
        await_route_value(lane, Payload::rows, {call.operation, number, peer}, i, &value);
    if (result == WaitResult::aborted) return;
    if (result == WaitResult::end_of_data) {
      if (slot == 0) record_bad_source(lane, where);
    } else if (call.returns()) {
      store_returned(call, plan, peer, where, value);
    } else if (const std::int32_t row = received_row(lane, plan, where); row >= 0) {
      call.to[row] = value;
    }
  }
}

// In shared memory.
struct RouteValuesState {
  CallHeader header;
  ErrorRecord refusal;
  std::uint64_t number;
  bool failed;
  PlanFault fault;
};

// [block] The first warps send, the others receive; the first warp of block 0 posts and compares the call
// headers.
__device__ inline void run_route_values(const RouteValuesArguments& call, RouteValuesState* state,
                                        const PlanView& plan) {
  const LaneView& lane = call.lane;
  const int warp = threadIdx.x / 32, block = static_cast<int>(blockIdx.x),
            blocks = static_cast<int>(gridDim.x);
  const bool coordinates = block == 0 && warp == 0, sends = call.phase != Phase::receive,
             receives = call.phase != Phase::send;
  if (coordinates) {
    if (threadIdx.x == 0) {
      state->header.terms = call.terms;
      state->header.terms.add(static_cast<std::int64_t>(plan.header->call));
      set_epoch(*lane.epoch, &state->header);
      state->header.facts = make_header_facts(call.operation, plan.header->tokens);
    }
    __syncwarp();
    if (sends) post_header(lane, state->number, state->header);
    if (receives) agree_with_all(lane, state->number, state->header, true);
  }
  if (warp < kValueSendWarps) {
    if (!sends) return;
    if (!coordinates) {
      const RouteValueIterator messages(lane, messages_with(lane, plan, !call.returns()),
                                        block * kValueSendWarps + warp - 1, blocks * kValueSendWarps - 1);
      if (call.returns()) {
        send_row_values(call, state->number, messages, plan);
      } else {
        send_route_values(lane, state->number, call.from, messages, plan);
      }
    }
    sync_threads_of(1, 32 * kValueSendWarps);
    if (threadIdx.x == 0) publish_end_of_stream(lane, state->number, blocks);
    return;
  }
  if (!receives) return;
  constexpr int kReceiveWarps = kValueWarps - kValueSendWarps;
  const int worker = block * kReceiveWarps + warp - kValueSendWarps;
  zero_unsent_values(call, plan, 32 * worker + static_cast<int>(threadIdx.x % 32),
                     32 * kReceiveWarps * blocks);
  receive_values(call, state->number, worker, kReceiveWarps * blocks, plan);
}

// [block]
__device__ inline void send_values(const RouteValuesArguments& call, RouteValuesState* state) {
  const LaneView& lane = call.lane;
  const PlanView plan = view_plan(call.plan, lane.plan_shape);
  if (threadIdx.x == 0) {
    state->number = lane.state->calls[blockIdx.x] + 1;
    state->failed = is_aborted(lane, kExchangeFailed);
    state->fault = check_plan(lane, *plan.header, -1);
    const std::int64_t tokens = plan.header->tokens, total = plan.header->total;
    const bool null_values = (call.from == nullptr && (call.returns() ? total : tokens) > 0) ||
                             (call.to == nullptr && (call.returns() ? tokens : total) > 0);
    if (state->fault == PlanFault::none && null_values)
      state->fault = call.operation == Operation::combine ? PlanFault::weights : PlanFault::null_values;
  }
  __syncthreads();
  if (state->failed) return;
  if (state->fault == PlanFault::none) {
    run_route_values(call, state, plan);
  } else if (blockIdx.x == 0) {
    if (call.phase != Phase::receive)
      refuse_plan(lane, call.operation, state->number, *plan.header, state->fault, -1, &state->refusal);
    if (call.phase != Phase::send) drain_headers(lane, state->number, call.operation);
  }
  if (call.phase != Phase::send && !call.continues) store_call_number(lane, state->number);
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
