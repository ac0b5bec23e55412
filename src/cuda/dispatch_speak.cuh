// What a block of dispatch knows, and what it says and learns: counts, letters, places.
#pragma once

#include "cuda/dispatch_receive.cuh"
#include "cuda/dispatch_send.cuh"
#include "cuda/plan_header.cuh"
#include "cuda/shared_copy.cuh"

namespace ferry::cuda {

// From so many tokens on, every sending block counts its own and they add up; fewer each block counts alone.
inline constexpr std::int64_t kCountTogether = 1024;

// From so many tokens on, a rank waits for the counts of all to store rows where they stay; with fewer,
// waiting costs more than the receivers' copies.
inline constexpr std::int64_t kPlaceFrom = 256;

// In a block's shared memory: what its functions work on.
struct BlockState {
  DispatchArguments call;
  RoutingTables tables;
  Places places;
  SendCounts counts;
  Announcer announcer;
  PlacesScratch scratch;
  LetterContent letter;
  ErrorRecord refusal;
  std::uint64_t number;  // of the call
  std::int64_t tokens;   // N
  SendShare share;
  BadIds bad;
  std::uint32_t takers, placers;  // ranks that let this one place rows; that place them here
  std::uint32_t quarterers;       // that announce quarters apart
  std::int32_t runs[kMaxRanks];   // of messages, side by side, by source
  bool failed;
  PlanFault fault;

  __host__ __device__ static constexpr std::int64_t padded(std::int64_t bytes) {
    return (bytes + 15) / 16 * 16;
  }

  // With the arrays behind it.
  __host__ __device__ static std::int64_t bytes(const LaneView& lane) {
    return padded(sizeof(BlockState)) + RoutingTables::bytes(lane.experts, lane.ranks) +
           padded(Places::bytes(lane.experts, lane.ranks, lane.groups, lane.layout == Layout::rank_major)) +
           SendCounts::bytes(lane.signals);
  }
  // By one thread: where the arrays are.
  __device__ __forceinline__ void lay_out(const LaneView& lane) {
    const bool rank_major = lane.layout == Layout::rank_major;
    std::byte* memory = tables_memory();
    tables = RoutingTables::at(memory, lane.experts, lane.ranks);
    memory += RoutingTables::bytes(lane.experts, lane.ranks);
    places = Places::at(memory, lane.experts, lane.ranks, lane.groups, rank_major);
    memory += padded(Places::bytes(lane.experts, lane.ranks, lane.groups, rank_major));
    counts = {reinterpret_cast<std::int32_t*>(memory), 2 * lane.signals.count_words()};
  }
  __device__ std::byte* tables_memory() {
    return reinterpret_cast<std::byte*>(this) + padded(sizeof(BlockState));
  }
};

// N, where it makes sense; a count that only the device sees, `tokens`, is checked here.
__device__ inline std::int64_t tokens_of(const DispatchArguments& call, std::uint64_t number,
                                         std::int64_t tokens, bool reports) {
  if (call.device_tokens == nullptr) return call.tokens;
  const std::int64_t most = min(call.tokens, std::int64_t{call.lane.max_tokens});
  if (tokens >= 0 && tokens <= most) return tokens;
  if (reports)
    end_call(call.lane, number, Operation::dispatch, EndedCall::Why::too_many, call.lane.rank, 0, tokens,
             most);
  return 0;
}

// By one thread: what check() will say of this call's ids.
static __device__ __noinline__ void keep_bad_ids(const DispatchArguments& call, const BadIds& bad) {
  if (bad.number == 0) return;
  FoundOnDevice& found = call.lane.state->found;
  if (found.bad_ids == 0) {
    found.first_bad_id_route = bad.lowest;
    found.first_bad_id = id_at(call, static_cast<std::int64_t>(bad.lowest));
  }
  found.bad_ids += bad.number;
}

// By the whole of sending block `block` of `blocks`, whose warps have counted their tokens: this block's sums
// for the others, and what comes before it from theirs.
static __device__ __noinline__ void add_up(const LaneView& lane, BlockState* state, const SendCounts& counts,
                                           int block, int blocks) {
  std::int32_t* sums = lane.block_counts + std::int64_t{block} * counts.stride;
  for (int i = threadIdx.x; i < counts.stride; i += blockDim.x) {
    std::int32_t sum = 0;
    for (int warp = 0; warp < kWorkWarps; ++warp) sum += counts.of_warp(warp)[i];
    sums[i] = sum;
  }
  if (threadIdx.x == 0 && state->bad.number > 0) {
    atomicAdd(&lane.state->bad_ids, state->bad.number);
    atomicMin(&lane.state->lowest_bad_id, state->bad.lowest);
  }
  __syncthreads();
  // Release at gpu scope: the sums of all threads (ordered by the barrier) before the block's word.
  if (threadIdx.x == 0) store_release_gpu(&lane.block_counted[block], state->number);
  // Acquire, by a thread for each block; then the barrier, before all threads' reads of the sums.
  for (int other = threadIdx.x; other < blocks; other += blockDim.x)
    wait_here(lane, &lane.block_counted[other], state->number);
  __syncthreads();
  for (int i = threadIdx.x; i < counts.stride; i += blockDim.x) {
    std::int32_t before = 0, all = 0;
#pragma unroll 8
    for (int other = 0; other < blocks; ++other) {
      const std::int32_t sum = lane.block_counts[std::int64_t{other} * counts.stride + i];
      all += sum;
      if (other < block) before += sum;
    }
    counts.before()[i] = before;
    counts.all()[i] = all;
  }
  if (block != 0 || threadIdx.x != 0) return;
  state->bad = {lane.state->bad_ids, lane.state->lowest_bad_id};
  lane.state->bad_ids = 0;
  lane.state->lowest_bad_id = ~0ull;
}

// By the whole of sending block `block` of `blocks`: what comes before each of its warps' tokens, and, in
// block 0, the sum of all.
static __device__ __forceinline__ void count_routes(BlockState* state, int block, int blocks) {
  const DispatchArguments& call = state->call;
  const SendCounts counts = state->counts;  // held: not read again after every store
  const SendShare share = state->share;
  const int first = block * kWorkWarps;
  const bool together = blocks > 1 && share.tokens >= kCountTogether, counts_all = !together && block == 0;
  const std::int32_t begin = share.token_begin(first), end = share.token_begin(first + kWorkWarps);
  count_tokens(call, state->tables, together ? begin : 0, counts_all ? share.tokens : end,
               together || block == 0 ? &state->bad : nullptr, [&](std::int32_t token) {
                 if (token < begin) return counts.before();
                 return token < end ? counts.of_warp(share.last_worker(token) - first) : counts.all();
               });
  __syncthreads();
  if (together) add_up(call.lane, state, counts, block, blocks);
  // The same thread has the same numbers: no barrier in between.
  for (int i = threadIdx.x; i < counts.stride; i += blockDim.x) {
    std::int32_t before = counts.before()[i], own[kWorkWarps];
#pragma unroll
    for (int w = 0; w < kWorkWarps; ++w) own[w] = counts.of_warp(w)[i];
#pragma unroll
    for (int w = 0; w < kWorkWarps; ++w) {
      counts.of_warp(w)[i] = before;
      before += own[w];
    }
    if (!together) counts.all()[i] += before;
  }
  __syncthreads();
}

// By one thread.
__device__ inline void fill_letter(BlockState* state, bool fused) {
  const DispatchArguments& call = state->call;
  LetterContent& letter = state->letter;
  if (call.replay) letter.terms.add(static_cast<std::int64_t>(call.plan.header->call));
  letter.facts = facts_of(Operation::dispatch, static_cast<std::int32_t>(state->tokens));
  if (state->tokens > 0) letter.facts.argument[0] = call.weights != nullptr;
  if (!call.replay) {
    letter.facts.runs = static_cast<std::uint16_t>(state->share.workers);
    letter.facts.quarters = state->share.splits > 0;
  }
  letter.facts.places_rows = fused && state->tokens >= kPlaceFrom;
  letter.facts.takes_rows = fused && call.own_memory && !call.weigh_rows && call.dot_rows == nullptr;
}

// By the whole block: everybody's letters and, from their counts, all places. False, on all threads alike:
// the call has ended early. `speaks`: this block says so to the host and the other blocks.
static __device__ __forceinline__ bool await_places(BlockState* state, bool speaks) {
  const DispatchArguments& call = state->call;
  bool agreed = true;
  // The last warp has few counts to wait for, if any.
  if (threadIdx.x / 32 == kBlockWarps - 1) {
    LetterFacts theirs;
    agreed = await_letters(call.lane, state->number, state->letter, speaks, &theirs);
    const bool is_rank = static_cast<int>(threadIdx.x % 32) < call.lane.ranks;
    if (is_rank) state->runs[threadIdx.x % 32] = theirs.runs;
    const std::uint32_t takers = __ballot_sync(~0u, is_rank && theirs.takes_rows),
                        placers = __ballot_sync(~0u, is_rank && theirs.places_rows);
    const std::uint32_t quarterers = __ballot_sync(~0u, is_rank && theirs.quarters);
    if (threadIdx.x % 32 == 0) {
      state->quarterers = quarterers;
      state->takers = state->letter.facts.places_rows ? takers : 0;
      state->placers = state->letter.facts.takes_rows ? placers : 0;
    }
  }
  return find_places({call, call.plan, state->tables, state->number}, state->places, &state->scratch, agreed,
                     speaks && !call.replay);
}

// What downstream reads of a call that ended early: nothing arrived. By `threads` threads.
static __device__ __noinline__ void clear_arrivals(const DispatchArguments& call, int thread, int threads) {
  for (int group = thread; group <= call.lane.groups; group += threads) {
    if (group < call.lane.groups) call.counts[group] = 0;
    call.row_offsets[group] = 0;
  }
}

__device__ inline void publish_totals(const LaneView& lane, std::uint64_t number, std::int64_t total) {
  lane.totals->total = total;
  // Release: the host reads the total after the call number.
  store_release_sys(&lane.totals->call, number);
}

// By the whole of the block that speaks, once places are known: what the caller and the plan keep of them.
static __device__ __noinline__ void publish_places(const BlockState& state) {
  const DispatchArguments& call = state.call;
  const LaneView& lane = call.lane;
  const Places& places = state.places;
  const PlanView& plan = call.plan;
  for (int group = threadIdx.x; group <= lane.groups; group += blockDim.x) {
    if (group < lane.groups) call.counts[group] = places.count[group];
    call.row_offsets[group] = places.begin[group];
  }
  if (threadIdx.x == blockDim.x - 1) publish_totals(lane, state.number, places.begin[lane.groups]);
  if (call.replay) return;
  for (int i = threadIdx.x; i < lane.ranks * lane.ranks; i += blockDim.x)
    plan.tokens_between[i] = places.between[i];
  if (threadIdx.x != 0) return;
  write_plan_header(plan.header, lane, state.number, state.tokens, places.begin[lane.groups],
                    static_cast<std::int64_t>(state.scratch.dropped));
  if (state.scratch.dropped > 0)
    lane.state->found.overflow = worst_overflow(lane, state.tables, state.scratch);
  lane.state->dispatches += 1;
}

// By warp `warp` of sending block `block` of `blocks`: all it sends, from ids or by a plan. `places`: it
// waits for them.
static __device__ __noinline__ void send_tokens(BlockState* state, int block, bool waits) {
  Sender sender{state->call,
                state->tables,
                state->call.plan,
                waits ? &state->places : nullptr,
                waits ? state->takers : 0,
                &state->announcer,
                state->number};
  const int warp = static_cast<int>(threadIdx.x / 32);
  sender.send_units(state->share, block * kWorkWarps + warp, state->counts.of_warp(warp));
}
static __device__ __noinline__ void send_by_plan(BlockState* state, int block, int blocks, bool waits) {
  Sender sender{state->call,
                state->tables,
                state->call.plan,
                waits ? &state->places : nullptr,
                waits ? state->takers : 0,
                &state->announcer,
                state->number};
  const int warp = static_cast<int>(threadIdx.x / 32);
  sender.send_planned(state->tokens, warp * blocks + block, blocks * kWorkWarps);
}

// By warp `worker` of `workers`: all it receives.
static __device__ __noinline__ bool receive_tokens(BlockState* state, int worker, int workers) {
  return Receiver{state->call, state->tables, state->call.plan, state->places,
                  state->runs, state->number, state->placers,   state->quarterers}
      .take_all(worker, workers);
}

}  // namespace ferry::cuda
