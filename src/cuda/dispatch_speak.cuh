// What a block of dispatch knows, and what the block that speaks for its rank does: counts, letters, places.
#pragma once

#include "cuda/dispatch_receive.cuh"
#include "cuda/letters.cuh"
#include "cuda/plan_header.cuh"

namespace ferry::cuda {

inline constexpr int kMaxStages = 14;  // of a block

// First rows of this rank's experts lie in shared memory if they are not too many.
inline constexpr int kNearRows = 512;

// From so many tokens on, all blocks count ids together.
inline constexpr std::int64_t kCountTogether = 1024;

struct BlockState {
  SendScratch send;
  LetterContent letter;
  ErrorRecord refusal;
  std::uint64_t arrivals[kMaxStages];
  std::uint64_t number;  // of the call
  std::int64_t tokens;   // N
  BadIds bad;
  std::int32_t first_rows[kNearRows];
  bool agreed, failed;
  PlanFault fault;
};

// N, where it makes sense; a count that only the device sees is checked here.
__device__ inline std::int64_t tokens_of(const DispatchArguments& call, std::uint64_t number, bool reports) {
  if (call.device_tokens == nullptr) return call.tokens;
  const std::int64_t tokens = *call.device_tokens,
                     most = min(call.tokens, std::int64_t{call.lane.max_tokens});
  if (tokens >= 0 && tokens <= most) return tokens;
  if (reports)
    end_call(call.lane, number, Operation::dispatch, EndedCall::Why::too_many, call.lane.rank, 0, tokens,
             most);
  return 0;
}

// By one thread: what check() will say of this call's ids.
__device__ inline void keep_bad_ids(const DispatchArguments& call, const BlockState& state) {
  if (state.bad.number == 0) return;
  FoundOnDevice& found = call.lane.state->found;
  if (found.bad_ids == 0) {
    found.first_bad_id_route = state.bad.lowest;
    found.first_bad_id = id_at(call, static_cast<std::int64_t>(state.bad.lowest));
  }
  found.bad_ids += state.bad.number;
}

__device__ inline bool counts_together(const DispatchArguments& call, const BlockState& state) {
  return !call.replay && gridDim.x > 1 && state.tokens >= kCountTogether;
}

// By the `threads` receiving threads of a block that is not the first, which have nothing else to do yet: the
// ids of the block's share of the tokens, added to the lane's counts. `tables` are their own.
__device__ inline void count_share(const DispatchArguments& call, BlockState* state,
                                   const RoutingTables& tables, int thread, int threads, int barrier) {
  const LaneView& lane = call.lane;
  LaneState* sum = lane.state;
  const int counting = static_cast<int>(gridDim.x) - 1, both = lane.experts + lane.ranks;
  const std::int64_t each = (state->tokens + counting - 1) / counting, begin = (blockIdx.x - 1) * each;
  for (int i = thread; i < both; i += threads) tables.experts[i] = 0;
  sync_threads_of(barrier, threads);
  count_tokens(call, tables, begin, min(begin + each, state->tokens), thread, threads, &state->bad);
  sync_threads_of(barrier, threads);
  for (int i = thread; i < both; i += threads) {
    if (tables.experts[i] != 0) atomicAdd(&sum->counts[i], tables.experts[i]);
  }
  if (thread == 0 && state->bad.number > 0) {
    atomicAdd(&sum->bad_ids, state->bad.number);
    atomicMin(&sum->lowest_bad_id, state->bad.lowest);
  }
  // Each thread's additions before its block's mark, and all blocks' before the last one's word to block 0.
  __threadfence();
  sync_threads_of(barrier, threads);
  if (thread != 0 ||
      atomicInc(&sum->counters, static_cast<unsigned>(counting - 1)) != static_cast<unsigned>(counting - 1))
    return;
  __threadfence();
  store_release_gpu(&sum->counted, state->number);
}

// By the whole of block 0: the sums of all blocks, to the tables; the lane's are as before the call again.
__device__ inline void gather_counts(const DispatchArguments& call, BlockState* state,
                                     const RoutingTables& tables) {
  LaneState* sum = call.lane.state;
  // Acquire, by each thread for itself: the sums before their reads.
  wait_here(call.lane, &sum->counted, state->number);
  for (int i = threadIdx.x; i < call.lane.experts + call.lane.ranks; i += blockDim.x) {
    tables.experts[i] = sum->counts[i];
    sum->counts[i] = 0;
  }
  if (threadIdx.x != 0) return;
  state->bad = {sum->bad_ids, sum->lowest_bad_id};
  sum->bad_ids = 0;
  sum->lowest_bad_id = ~0ull;
}

// Letters with this rank's counts to everybody. By the whole of block 0; the tables hold all tokens
// afterwards.
__device__ inline void announce_counts(const DispatchArguments& call, BlockState* state,
                                       const RoutingTables& tables, const PlanView& plan) {
  const LaneView& lane = call.lane;
  const int warp = threadIdx.x / 32;
  if (counts_together(call, *state)) {
    gather_counts(call, state, tables);
  } else if (!call.replay) {
    count_tokens(call, tables, 0, state->tokens, threadIdx.x, blockDim.x, &state->bad);
  }
  if (threadIdx.x == 0) {
    state->letter.terms = call.terms;
    state->letter.count = static_cast<std::int32_t>(state->tokens);
    for (int& argument : state->letter.argument) argument = 2;
    state->letter.argument[0] = state->tokens == 0 ? 2 : call.weights != nullptr;
    if (call.replay) {
      const int option = state->letter.terms.option_count++;
      state->letter.terms.option[option] = static_cast<std::int64_t>(plan.header->call);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) keep_bad_ids(call, *state);
  const int warps = static_cast<int>(blockDim.x / 32);
  for (int step = warp; step < lane.ranks; step += warps) {
    const int peer = (lane.rank + 1 + step) % lane.ranks;
    write_letter(lane, state->number, peer, state->letter, call.replay ? nullptr : tables.experts);
  }
  __syncthreads();
  if (warp == 0) announce_letters(lane, state->number);
}

// What downstream reads of a call that ended early: nothing arrived.
__device__ inline void clear_arrivals(const DispatchArguments& call) {
  const LaneView& lane = call.lane;
  const int local = lane.first_expert[lane.rank + 1] - lane.first_expert[lane.rank];
  const int groups = lane.layout == Layout::rank_major ? lane.ranks : local;
  for (int group = threadIdx.x; group <= groups; group += blockDim.x) {
    if (group < groups) call.counts[group] = 0;
    call.row_offsets[group] = 0;
  }
}

__device__ inline void publish_totals(const LaneView& lane, std::uint64_t number, std::int64_t total) {
  lane.totals->total = total;
  // Release: the host reads the total after the call number.
  store_release_sys(&lane.totals->call, number);
}

// By the whole of block 0: all counts, then all places, then word to the other blocks. `scratch` lies in
// stages, which nobody uses meanwhile.
__device__ inline void place_arrivals(const DispatchArguments& call, BlockState* state,
                                      const RoutingTables& tables, const PlanView& plan,
                                      PlacesScratch* scratch) {
  const LaneView& lane = call.lane;
  const std::uint64_t number = state->number;
  scratch->prepare(lane);
  if (threadIdx.x < 32) {
    const bool agreed = await_letters(lane, number, state->letter);
    if (threadIdx.x == 0) state->agreed = agreed;
  }
  // Also: the letters, acquired by the first warp, before this block's reads of their counts.
  __syncthreads();
  if (!state->agreed) {
    clear_arrivals(call);
    if (threadIdx.x == 0) publish_totals(lane, number, 0);
    return;
  }
  const Counts counts{call, plan, static_cast<int>(number & 1)};
  const std::int64_t total = compute_places(call, counts, plan, tables.rank_of, scratch);
  if (threadIdx.x == 0 && !call.replay) {
    write_plan_header(plan.header, lane, number, state->tokens, total,
                      static_cast<std::int64_t>(scratch->dropped));
  }
  __syncthreads();
  // Release at gpu scope: places, counts and the plan's header, by all threads of this block (ordered by the
  // barrier), before the word that other blocks wait for.
  if (threadIdx.x == 0) store_release_gpu(&lane.state->placed, number);
  if (!call.replay) count_load(call, counts);
  if (threadIdx.x != 0) return;
  publish_totals(lane, number, total);
  if (call.replay) return;
  if (scratch->dropped > 0) lane.state->found.overflow = worst_overflow(lane, *scratch);
  lane.state->dispatches += 1;
}

// What the letter said that this rank sent itself: the receive half compares the others with it.
__device__ inline void restore_letter(const LaneView& lane, BlockState* state) {
  const DeviceLetter* letter = lane.letter(lane.rank, static_cast<int>(state->number & 1), lane.rank);
  if (threadIdx.x < kDeviceOptions) state->letter.terms.option[threadIdx.x] = letter->option[threadIdx.x];
  if (threadIdx.x == 0) state->letter.terms.operation = letter->operation;
  __syncthreads();
}

}  // namespace ferry::cuda
