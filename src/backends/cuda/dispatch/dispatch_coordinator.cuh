// What a block of dispatch knows, and what it says and learns: counts, letters, places.
#pragma once

#include <algorithm>

#include "backends/cuda/device/shared_copy.cuh"
#include "backends/cuda/dispatch/dispatch_receive.cuh"
#include "backends/cuda/dispatch/dispatch_resend.cuh"
#include "backends/cuda/dispatch/padding.cuh"
#include "backends/cuda/protocol/plan_header.cuh"

namespace ferry::cuda {

// From so many tokens on, every sending block counts its own and they add up; fewer each block counts alone.
inline constexpr std::int64_t kCountTogether = 1024;

// In a block's shared memory: what its functions work on.
struct BlockState {
  FlagPublisher<kWorkWarps> publisher;
  ScanScratch scratch;
  HeaderContent header;
  ErrorRecord refusal;
  std::uint64_t number;  // of the call
  std::int64_t tokens;   // N
  SendPartition share;
  BadIds bad;
  std::uint32_t direct_write_peers,
      direct_writers;                 // ranks that let this one place rows; that place them here
  SourceSplits splits;                // of the sources' rows
  std::int32_t runs[kMaxRanks];       // of messages, side by side, by source
  std::int32_t tokens_of[kMaxRanks];  // of sources whose messages lie by token; -1: by number
  bool failed;
  PlanFault fault;

  // With the arrays behind it, whose places the call learns.
  static std::int64_t lay_out(DispatchArguments* call);
};

inline std::int64_t BlockState::lay_out(DispatchArguments* call) {
  const LaneView& lane = call->lane;
  BlockOffsets& at = call->shared;
  std::int64_t end = 0;
  const auto take = [&](std::int64_t bytes) {
    const std::int64_t begin = end;
    end = (end + bytes + 15) / 16 * 16;
    return static_cast<std::int32_t>(begin);
  };
  const std::int64_t ranks = lane.ranks, experts = lane.experts, groups = lane.groups;
  take(sizeof(BlockState));
  at.tables = take(RoutingTables::bytes(lane.experts, lane.ranks));
  std::byte* const zero = nullptr;
  const RoutingTables tables = RoutingTables::at(zero + at.tables, lane.experts, lane.ranks);
  const auto offset = [&](const auto* array) {
    return static_cast<std::int32_t>(reinterpret_cast<const std::byte*>(array) - zero);
  };
  at.capacity = offset(tables.capacity);
  at.first_expert = offset(tables.first_expert);
  at.position_of = offset(tables.position_of);
  at.expert_at = offset(tables.expert_at);
  at.rank_of = offset(tables.rank_of);
  at.from_me = take(4 * std::max(experts, ranks));
  at.here = take(4 * (lane.layout == Layout::rank_major ? ranks : groups * ranks));
  at.begin = take(4 * (groups + 1));
  at.count = take(4 * groups);
  at.between = take(4 * ranks * ranks);
  at.offset = take(4 * experts);
  // What the last warp streams it receives, and by then nobody counts any more.
  constexpr std::int64_t kStream = RowStream<TokenParts>::kBytes;
  // Asynchronous loads to where no line begins take longer.
  end = (end + kLine - 1) / kLine * kLine;
  at.streams = take(kWorkWarps * kStream);
  at.counts = take(std::max(kStream, SendCounts::bytes(lane.signals)));
  return end;
}

__device__ __forceinline__ BlockState* block_state() {
  return reinterpret_cast<BlockState*>(block_memory);
}
// Of this warp.
__device__ __forceinline__ std::byte* stream_of(const DispatchArguments& call) {
  return block_memory + call.shared.streams + threadIdx.x / 32 * RowStream<TokenParts>::kBytes;
}
__device__ __forceinline__ SendCounts counts_of(const DispatchArguments& call) {
  return {reinterpret_cast<std::int32_t*>(block_memory + call.shared.counts),
          2 * call.lane.signals.count_words};
}

// N, where it makes sense; a count that only the device sees is checked here.
__device__ inline std::int64_t tokens_of(const DispatchArguments& call, bool reports) {
  if (call.device_tokens == nullptr) return call.tokens;
  const std::int64_t tokens = *call.device_tokens;
  const std::int64_t most = min(call.tokens, std::int64_t{call.lane.max_tokens});
  if (tokens >= 0 && tokens <= most) return tokens;
  if (reports)
    end_call(call.lane, call.lane.state->calls[blockIdx.x] + 1, Operation::dispatch,
             DeviceError::Why::too_many, call.lane.rank, 0, tokens, most);
  return 0;
}

// By one thread: what check() will say of this call's ids.
static __device__ __noinline__ void keep_bad_ids(const DispatchArguments& call, const BadIds& bad) {
  if (bad.number == 0) return;
  DeviceDiagnostics& found = call.lane.state->found;
  if (found.bad_ids == 0) {
    found.first_bad_id_route = bad.lowest;
    found.first_bad_id = id_at(call, static_cast<std::int64_t>(bad.lowest));
  }
  found.bad_ids += bad.number;
}

// By the whole of sending block `block` of `blocks`, whose warps have counted their tokens: this block's sums
// for the others, and what comes before it from theirs.
static __device__ __noinline__ void add_up(const DispatchArguments& call, int block, int blocks) {
  const LaneView& lane = call.lane;
  const SendCounts counts = counts_of(call);
  BlockState* const state = block_state();
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
  if (block != blocks - 1 || threadIdx.x != 0) return;
  state->bad = {lane.state->bad_ids, lane.state->lowest_bad_id};
  lane.state->bad_ids = 0;
  lane.state->lowest_bad_id = ~0ull;
}

// By the whole of block `block` of `blocks` that share the tokens: what comes before each of its warps'
// tokens, and, if it `counts_all`, which the last may, the sum of all. `first`: from token 0 on.
static __device__ __forceinline__ void count_routes(const DispatchArguments& call, int block, int blocks,
                                                    bool counts_all, const CountedIds& first) {
  BlockState* const state = block_state();
  const SendCounts counts = counts_of(call);
  const SendPartition share = state->share;
  const int first_worker = block * kWorkWarps;
  const bool together = blocks > 1 && share.tokens >= kCountTogether;
  const std::int32_t begin = share.token_begin(first_worker),
                     end = share.token_begin(first_worker + kWorkWarps);
  const std::int32_t from = together ? begin : 0, until = counts_all ? share.tokens : end;
  count_tokens(
      call, BlockTables::of(call), from, until, from == 0 ? first : CountedIds::of(call, from, until),
      together || counts_all ? &state->bad : nullptr, [&](std::int32_t token) {
        return token < begin ? counts.before() : counts.of_warp(share.last_worker(token) - first_worker);
      });
  __syncthreads();
  if (together) add_up(call, block, blocks);
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
    if (!together) counts.all()[i] = before;
  }
  __syncthreads();
}

// By the whole block, which has no tokens of its own: the sum of all.
static __device__ __forceinline__ void count_all(const DispatchArguments& call, const CountedIds& first) {
  BlockState* const state = block_state();
  count_tokens(call, BlockTables::of(call), 0, state->share.tokens, first, &state->bad,
               [&](std::int32_t) { return counts_of(call).all(); });
  __syncthreads();
}

// By one thread. `share`: of those that send. `by_token`: how messages lie.
__device__ __forceinline__ void fill_facts(const DispatchArguments& call, const SendPartition& share,
                                           bool fused, bool by_token) {
  BlockState* const state = block_state();
  HeaderFacts facts = facts_of(Operation::dispatch, static_cast<std::int32_t>(state->tokens));
  if (state->tokens > 0) facts.argument[0] = call.weights != nullptr;
  facts.runs = static_cast<std::uint16_t>(share.workers);
  facts.splits = static_cast<std::uint8_t>(share.splits);
  facts.by_token = by_token;
  facts.direct_write = fused && state->tokens >= kPlaceFrom;
  facts.takes_rows = fused && call.own_memory && !call.apply_weights && call.dot_rows == nullptr;
  state->header.facts = facts;
}

// By the whole block: everybody's letters and, from their counts, all places. False, on all threads alike:
// the call has ended early. `coordinates`: this block says so to the host and the other blocks. `all`: as
// find_places.
template <class Traits>
__device__ __forceinline__ bool await_row_offsets(const DispatchArguments& call, bool coordinates, bool all) {
  BlockState* const state = block_state();
  bool agreed = true;
  // The last warp has few counts to wait for, if any.
  if (threadIdx.x / 32 == kBlockWarps - 1) {
    HeaderFacts theirs;
    agreed = await_headers(call.lane, state->number, state->header, coordinates, &theirs);
    const bool is_rank = static_cast<int>(threadIdx.x % 32) < call.lane.ranks;
    if (is_rank) {
      state->runs[threadIdx.x % 32] = theirs.runs;
      state->tokens_of[threadIdx.x % 32] = theirs.by_token ? theirs.count : -1;
    }
    const std::uint32_t direct_write_peers = __ballot_sync(~0u, is_rank && theirs.takes_rows),
                        direct_writers = __ballot_sync(~0u, is_rank && theirs.direct_write);
    const SourceSplits splits = SourceSplits::of(is_rank ? theirs.splits : 0);
    if (threadIdx.x % 32 == 0) {
      state->splits = splits;
      state->direct_write_peers = state->header.facts.direct_write ? direct_write_peers : 0;
      state->direct_writers = state->header.facts.takes_rows ? direct_writers : 0;
    }
  }
  const Counts<Traits> counts{call, BlockTables::of(call), state->number};
  return compute_row_offsets(counts, RowOffsets::of(call), &state->scratch, agreed, all,
                             coordinates && !Traits::replays(call));
}

// What downstream reads of a call that ended early: nothing arrived. By `threads` threads.
static __device__ __noinline__ void clear_received(const DispatchArguments& call, int thread, int threads) {
  for (int group = thread; group <= call.lane.groups; group += threads) {
    if (group < call.lane.groups) call.counts[group] = 0;
    call.row_offsets[group] = 0;
  }
}

__device__ inline void publish_totals(const LaneView& lane, std::uint64_t number, std::int64_t total) {
  static_assert(sizeof(HostTotals) == sizeof(LLPacket));
  // In one access, which CUDA keeps one to mapped host memory where it is aligned (programming guide, mapped
  // memory): the host, which reads the call first, never sees its number without its total.
  store_packet_relaxed_sys(reinterpret_cast<LLPacket*>(lane.totals),
                           {number, static_cast<std::uint64_t>(total)});
}

// By the whole of the block that coordinates, once places are known: what the caller and the plan keep of
// them.
static __device__ __noinline__ void publish_row_offsets(const DispatchArguments& call) {
  const BlockState& state = *block_state();
  const LaneView& lane = call.lane;
  const RowOffsets places = RowOffsets::of(call);
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
    lane.state->found.overflow = worst_overflow(lane, BlockTables::of(call), state.scratch);
  lane.state->dispatches += 1;
}

// `waits`: for places.
__device__ __forceinline__ SendState send_state_of(const DispatchArguments& call, bool waits) {
  BlockState* const state = block_state();
  return {.call = call,
          .tables = BlockTables::of(call),
          .places = RowOffsets::of(call),
          .waits = waits,
          .direct_write_peers = waits ? state->direct_write_peers : 0,
          .publisher = &state->publisher,
          .number = state->number};
}

// Of worker `worker`, in the order it sends them.
template <class Traits>
__device__ __forceinline__ RowStream<TokenParts> own_rows(const DispatchArguments& call, int worker) {
  const SendPartition share = block_state()->share;
  return {stream_of(call),
          TokenParts::of<Traits>(call, share.splits, share.token_begin(worker), share.token_end(worker))};
}

// By worker `worker`: all it sends, from ids, having started own_rows(), or by a plan. `first`: of its first
// tokens.
template <class Traits>
__device__ __forceinline__ void send_tokens(const DispatchArguments& call, int worker, bool waits,
                                            const SlotRoute& first) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  const SendState state = send_state_of(call, waits);
  RowStream<TokenParts> rows = own_rows<Traits>(call, worker);
  rows.resume();
  if constexpr (Traits::kByToken) {
    RowPlanner planner{state, first};
    Sender<Traits>(state).send_units(block_state()->share, worker, planner, rows);
  } else {
    IdPlanner planner{state, counts_of(call).of_warp(warp), first};
    Sender<Traits>(state).send_units(block_state()->share, worker, planner, rows);
  }
}
template <class Traits>
__device__ __forceinline__ void send_by_plan(const DispatchArguments& call, int worker, bool waits) {
  const SendState state = send_state_of(call, waits);
  const SendPartition share = block_state()->share;
  RowStream<TokenParts> rows = own_rows<Traits>(call, worker);
  rows.start();
  PlanReader reader(state, Team::of(call.lane.top_k), share.token_begin(worker), share.token_end(worker));
  Sender<Traits>(state).send_units(share, worker, reader, rows);
}
// Where ids are sent as well, a function of its own: what it keeps in registers would have others kept in
// memory.
static __device__ __noinline__ void send_by_any_plan(const DispatchArguments& call, int worker, bool waits) {
  send_by_plan<GenericDispatch>(call, worker, waits);
}

// By warp `worker` of `workers`: all it receives.
template <class Traits>
__device__ __forceinline__ bool receive_tokens(const DispatchArguments& call, int worker, int workers) {
  BlockState* const state = block_state();
  const Receiver<Traits> receiver{.call = call,
                                  .tables = BlockTables::of(call),
                                  .places = RowOffsets::of(call),
                                  .incoming = {.call = call,
                                               .places = RowOffsets::of(call),
                                               .runs = state->runs,
                                               .tokens_of = state->tokens_of,
                                               .number = state->number},
                                  .direct_writers = state->direct_writers,
                                  .splits = state->splits,
                                  .memory = stream_of(call)};
  return receiver.take_all(worker, workers);
}

}  // namespace ferry::cuda
