// The blocks of combine's kernels: the role of each block and warp.
#pragma once

#include "backends/cuda/combine/combine_reduce.cuh"
#include "backends/cuda/device/shared_copy.cuh"
#include "backends/cuda/protocol/call_header.cuh"
#include "backends/cuda/protocol/plan_header.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

inline constexpr int kWeightsBarrier = 1;
inline constexpr int kStreamsBytes = kCombineWarps * SumStream::kBytes;

// The streams of the warps that move rows. Aligned to 128 bytes: asynchronous copies that straddle a line are
// slower.
extern __shared__ __align__(128) std::byte stream_memory[];

// The roles of this block.
template <Phase kPhase>
struct CombineRoles {
  static constexpr bool kSends = kPhase != Phase::receive, kReduces = kPhase != Phase::send;
  int senders, reducers;  // blocks with the role
  int reducer;            // this block's number among the reducers; negative if it is none
  bool sends, reduces;

  __device__ explicit CombineRoles(const CombineArguments& call) {
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    const bool separate = kSends && kReduces && blocks > 1;
    senders = separate ? call.senders : blocks;
    reducers = separate ? blocks - senders : blocks;
    reducer = block - (blocks - reducers);
    sends = kSends && block < senders;
    reduces = kReduces && reducer >= 0;
  }
};

// Shared memory of a block.
struct CombineBlockState {
  CombineArguments call;
  PlanHeader plan_header;
  FlagPublisher<kCombineWarps> publisher;
  CallHeader call_header;
  Epoch epoch;
  ErrorRecord refusal;
  std::uint64_t number;
  bool failed;  // the exchange has failed
  PlanFault fault;
};

// [thread] Checks the plan, and the arguments whose meaning depends on it.
template <class Traits>
__device__ __forceinline__ PlanFault check_arguments(const CombineArguments& call, const PlanHeader& header) {
  const PlanFault fault = check_plan(call.lane, header, -1);
  if (fault != PlanFault::none) return fault;
  const bool rows = header.total > 0, tokens = header.tokens > 0;
  if ((rows && call.outputs == nullptr) || (tokens && call.result == nullptr))
    return PlanFault::outputs_and_result;
  if (tokens && weights_travel<Traits>(call) && call.topk_weights == nullptr) return PlanFault::weights;
  if (!rows || !tokens) return PlanFault::none;
  if ((call.row_values == nullptr) != (call.route_values == nullptr)) return PlanFault::values;
  return PlanFault::none;
}

// [thread] Fills the fixed part of the call header.
__device__ inline void fill_header(const CombineArguments& call, const PlanHeader& header, CallHeader* out) {
  const bool rows = header.total > 0, tokens = header.tokens > 0;
  out->terms.add(static_cast<std::int64_t>(header.call));
  set_epoch(*call.lane.epoch, out);
  out->facts = make_header_facts(Operation::combine, header.tokens);
  auto& argument = out->facts.argument;
  if (rows || tokens) argument[0] = rows ? call.row_values != nullptr : call.route_values != nullptr;
  if (rows) argument[1] = call.row_weights != nullptr;
}

// Messages of the dispatch, from the plan: from the rank with this thread's number, and to it.
struct MessageCounts {
  std::int32_t received = 0, sent = 0;

  __device__ __forceinline__ explicit MessageCounts(const CombineArguments& call) {
    const int peer = static_cast<int>(threadIdx.x % 32), ranks = call.lane.ranks, rank = call.lane.rank;
    if (kWide || peer >= ranks) return;  // wide: read from the plan when they are needed
    received = call.plan.tokens_between[peer * ranks + rank];
    sent = call.plan.tokens_between[rank * ranks + peer];
  }
};

// [all warps but the last of reducer block `reducer` of `reducers`] Sends the weights that other ranks need
// for their sums. Comes before anything that waits, or ranks would wait for each other's weights.
__device__ __forceinline__ void send_weights(const CombineArguments& call, std::uint64_t number,
                                             std::int32_t sent_messages, int reducer, int reducers) {
  const LaneView& lane = call.lane;
  const int peer = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const bool is_receiver = peer < lane.ranks && (call.own_staged || peer != lane.rank);
  PeerMessages messages;
  if constexpr (kWide) {
    messages = {
        .lane = &lane, .tokens_between = call.plan.tokens_between, .sent = true, .own = call.own_staged};
  } else {
    messages.mine = is_receiver ? usable_messages(lane, sent_messages, lane.rank, peer) : 0;
  }
  send_route_values(lane, number, call.topk_weights,
                    RouteValueIterator(lane, messages, warp * reducers + reducer, reducers * kCombineWarps),
                    call.plan);
  sync_threads_of(kWeightsBarrier, 32 * kCombineWarps);
  if (threadIdx.x == 0) publish_end_of_stream(lane, number, reducers, Payload::weights);
}

// [block] The block's part of a call.
template <Phase kPhase, class Traits>
__device__ __forceinline__ void work(const CombineArguments& call, CombineBlockState* state,
                                     const MessageCounts& counts) {
  using Role = CombineRoles<kPhase>;
  const Role role(call);
  const LaneView& lane = call.lane;
  const int warp = static_cast<int>(threadIdx.x / 32), block = static_cast<int>(blockIdx.x);
  const std::uint64_t number = state->number;
  const bool moves_rows = warp < kCombineWarps;
  std::byte* const memory = stream_memory + warp * SumStream::kBytes;
  if (role.sends && block == 0 && !moves_rows) post_header(lane, number, state->call_header);
  // Reducers send the weights: they have nothing else to do yet.
  if (Role::kSends && weights_travel<Traits>(call) && moves_rows && role.reducer >= 0)
    send_weights(call, number, counts.sent, role.reducer, role.reducers);
  if (role.sends && moves_rows) {
    send_results<Traits>(call, number, warp * role.senders + block, role.senders * kCombineWarps,
                         counts.received, &state->publisher, memory);
  } else if (role.sends) {
    state->publisher.run(lane, number);
    if (threadIdx.x % 32 == 0) publish_end_of_stream(lane, number, role.senders);
  }
  if (!role.reduces) return;
  if (moves_rows) {
    reduce_tokens<Traits>(call, number, warp * role.reducers + role.reducer, role.reducers * kCombineWarps,
                          counts.sent, memory);
  } else if (role.reducer == 0) {
    agree_with_all(lane, number, state->call_header, true);
  }
}

// [block] Fills the block's state. Returns false if the exchange has failed.
template <class Traits>
__device__ __forceinline__ bool start_block(const CombineArguments& arguments, CombineBlockState* state) {
  // All loads from device memory are issued first, so that they are in flight together.
  const unsigned thread = threadIdx.x;
  std::uint64_t calls = 0;
  bool failed = false;
  if (thread == 0) calls = arguments.lane.state->calls[blockIdx.x];
  if (thread == 32) failed = is_aborted(arguments.lane, kExchangeFailed);
  if (thread < sizeof(Epoch) / 8)
    reinterpret_cast<std::uint64_t*>(&state->epoch)[thread] =
        reinterpret_cast<const std::uint64_t*>(arguments.lane.epoch)[thread];
  const unsigned word = thread - 64;
  if (word < sizeof(PlanHeader) / 8)
    reinterpret_cast<std::uint64_t*>(&state->plan_header)[word] =
        reinterpret_cast<const std::uint64_t*>(arguments.plan.header)[word];
  copy_to_shared(arguments, &state->call, thread, blockDim.x);
  copy_to_shared(arguments.terms, &state->call_header.terms, thread, blockDim.x);
  state->publisher.reset();
  __syncthreads();
  if (thread == 0) {
    state->number = calls + 1;
    state->call.plan.header = &state->plan_header;
    state->call.lane.epoch = &state->epoch;
  }
  if (thread == 32) state->failed = failed;
  if (thread == 64) state->fault = check_arguments<Traits>(state->call, state->plan_header);
  if (thread == 96) fill_header(state->call, state->plan_header, &state->call_header);
  __syncthreads();
  return !state->failed;
}

// [block] `block_state`: in shared memory.
template <Phase kPhase, class Traits>
__device__ __forceinline__ void run_combine_block(const CombineArguments& arguments,
                                                  CombineBlockState* block_state) {
  CombineBlockState& state = *block_state;
  // Issued first: these loads depend on the arguments only.
  const MessageCounts counts(arguments);
  if (!start_block<Traits>(arguments, &state)) return;
  const CombineArguments& call = state.call;
  const LaneView& lane = call.lane;
  if (state.fault == PlanFault::none) {
    work<kPhase, Traits>(call, &state, counts);
  } else if (blockIdx.x == 0) {
    if (kPhase != Phase::receive) {
      refuse_plan(lane, Operation::combine, state.number, *call.plan.header, state.fault, -1, &state.refusal);
    }
    if (kPhase != Phase::send) drain_headers(lane, state.number, Operation::combine);
  }
  if (kPhase != Phase::send) store_call_number(lane, state.number);
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
