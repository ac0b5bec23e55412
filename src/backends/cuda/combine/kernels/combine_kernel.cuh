// The kernels of combine: the role of each block and warp, for a call in one launch and for one in phases.
#pragma once

#include "backends/cuda/combine/combine_reduce.cuh"
#include "backends/cuda/device/shared_copy.cuh"
#include "backends/cuda/protocol/call_header.cuh"
#include "backends/cuda/protocol/plan_header.cuh"

namespace ferry::cuda {

// The compiled kernels of combine, from translation units that compile side by side.

// For every kind of call, fused or in phases.
const void* generic_combine_kernel(Phase phase);  // combine_generic.cu

// Fused calls whose rows and results have one type and nothing beside them; reductions exact and partial.
const void* plain_combine_kernel(Reduction reduction, DType type, bool weights_travel);   // combine_plain.cu
const void* shared_combine_kernel(Reduction reduction, DType type, bool weights_travel);  // combine_shared.cu

// Both phases of a call in bf16 with nothing beside its rows, no shared experts and no weights that travel;
// reductions exact and partial.
const void* bf16_combine_phase_kernel(Reduction reduction);  // combine_phases.cu

// Gathered input, whose reduction is always partial: every kind of call, and fused ones in bf16.
const void* gathered_combine_kernel(Phase phase);               // combine_gathered.cu
const void* gathered_bf16_combine_kernel(bool weights_travel);  // combine_gathered.cu

// For groups of more than kNarrowRanks ranks: combine_wide.cu.
const void* wide_combine_kernel(Phase phase);

}  // namespace ferry::cuda

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

namespace {

template <class Traits>
__global__ void __launch_bounds__(kCombineThreads, 1)
    combine_kernel(const __grid_constant__ CombineArguments arguments) {
  __shared__ CombineBlockState state;
  run_combine_block<Phase::fused, Traits>(arguments, &state);
}

// The phases of a split call are one kernel, so that a profiler lists both under one name.
template <class Traits>
__global__ void __launch_bounds__(kCombineThreads, 1)
    combine_phase_kernel(const __grid_constant__ CombineArguments arguments) {
  __shared__ CombineBlockState state;
  if (arguments.phase == Phase::send) {
    run_combine_block<Phase::send, Traits>(arguments, &state);
  } else {
    run_combine_block<Phase::receive, Traits>(arguments, &state);
  }
}

template <class Traits>
const void* kernel() {
  return reinterpret_cast<const void*>(&combine_kernel<Traits>);
}

template <class Traits>
const void* phase_kernel() {
  return reinterpret_cast<const void*>(&combine_phase_kernel<Traits>);
}

// The kernel of a reduction, with weights that travel or without, for rows and results of one type.
template <bool kShared, Reduction kReduction, bool kWeights>
const void* specialised_kernel(DType type) {
  switch (type) {
    case DType::bf16:
      return kernel<SpecialisedCombine<kReduction, DType::bf16, kWeights, kShared>>();
    case DType::fp16:
      return kernel<SpecialisedCombine<kReduction, DType::fp16, kWeights, kShared>>();
    case DType::fp32:
      break;
  }
  return kernel<SpecialisedCombine<kReduction, DType::fp32, kWeights, kShared>>();
}

template <bool kShared>
const void* specialised_kernel(Reduction reduction, DType type, bool weights_travel) {
  if (reduction == Reduction::exact) return specialised_kernel<kShared, Reduction::exact, false>(type);
  return weights_travel ? specialised_kernel<kShared, Reduction::partial, true>(type)
                        : specialised_kernel<kShared, Reduction::partial, false>(type);
}

}  // namespace
}  // namespace ferry::cuda::inline FERRY_WIDTH
