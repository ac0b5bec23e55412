// Facts about a dispatch that ranks exchange in call headers, and the coordinator block, which publishes the
// row offsets, counts and total computed from them.
#pragma once

#include "backends/cuda/dispatch/block_state.cuh"
#include "plan/slot.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

// [thread] Fills in this rank's facts for the call header. `partition`: among the senders.
__device__ __forceinline__ void fill_facts(const DispatchArguments& call, const SendPartition& partition,
                                           bool fused, bool token_indexed) {
  DispatchBlockState* const state = block_state();
  HeaderFacts facts = make_header_facts(Operation::dispatch, static_cast<std::int32_t>(state->tokens));
  facts.sender_warps = static_cast<std::uint16_t>(partition.workers);
  facts.log2_segments = static_cast<std::uint8_t>(partition.log2_segments);
  facts.token_indexed = token_indexed;
  // Sets of direct-write peers are bits of a word.
  facts.direct_write = !kWide && fused && state->tokens >= kManyTokens;
  facts.accepts_direct_writes =
      !kWide && fused && call.own_memory && !call.apply_weights && call.dot_rows == nullptr;
  facts.limits_rows = call.terms.option[kRowLimitOption] > 0;
  state->header.facts = facts;
}

// [thread] Records N of a rank, and the sizes of its shared groups.
__device__ __forceinline__ void note_tokens_of_rank(const LaneView& lane, std::int32_t rank,
                                                    std::int32_t tokens) {
  DispatchBlockState* const state = block_state();
  const auto shared = static_cast<std::int32_t>(SharedTokens::of(tokens, rank, lane.shared_split).count);
  state->rank_tokens[rank] = tokens;
  state->scratch.shared_tokens[rank] = shared;
  state->scratch.shared_rows[rank] = static_cast<std::uint32_t>(lane.shared_experts) *
                                     static_cast<std::uint32_t>(lane.by_alignment.round_up(shared));
}
// [thread] Notes the tokens of the rank with this thread's number. Not inlined, so that calls without shared
// experts do not fetch it.
static __device__ __noinline__ void note_rank_tokens(const LaneView& lane, std::int32_t tokens) {
  note_tokens_of_rank(lane, static_cast<std::int32_t>(threadIdx.x % 32), tokens);
}

// [warp] Waits for the headers of all ranks and records their facts, in wide kernels. Returns false if the
// call was aborted.
__device__ __forceinline__ bool note_facts_wide(const DispatchArguments& call, bool coordinates) {
  DispatchBlockState* const state = block_state();
  // All sources send whole rows, and no rank writes directly.
  if (threadIdx.x % 32 == 0) {
    state->segments = {0, 0};
    state->direct_write_peers = state->direct_writers = 0;
    state->limits_rows = false;
  }
  __syncwarp();
  return await_all_headers_wide(call.lane, state->number, state->header, coordinates,
                                [&](int rank, const HeaderFacts& theirs) {
                                  state->sender_warps[rank] = theirs.sender_warps;
                                  state->indexed_tokens[rank] = theirs.token_indexed ? theirs.count : -1;
                                  if (theirs.limits_rows) state->limits_rows = true;
                                  if (call.lane.shared_experts > 0)
                                    note_tokens_of_rank(call.lane, rank, theirs.count);
                                });
}

// [block] Waits for the call headers of all ranks and computes all row offsets from their counts. Returns
// false in all threads if the call was aborted. `coordinates`: this block reports differences to the host and
// to the other blocks, and records the counts. `all_ranks`: as in compute_row_offsets().
template <class Traits>
__device__ __forceinline__ bool await_row_offsets(const DispatchArguments& call, bool coordinates,
                                                  bool all_ranks) {
  DispatchBlockState* const state = block_state();
  bool agreed = true;
  // The last warp compares the headers: its threads have few counts to wait for, if any.
  if (kWide && threadIdx.x / 32 == kBlockWarps - 1) {
    agreed = note_facts_wide(call, coordinates);
  } else if (threadIdx.x / 32 == kBlockWarps - 1) {
    HeaderFacts theirs;
    agreed = await_all_headers(call.lane, state->number, state->header, coordinates, &theirs);
    const bool is_rank = static_cast<int>(threadIdx.x % 32) < call.lane.ranks;
    if (is_rank) {
      state->sender_warps[threadIdx.x % 32] = theirs.sender_warps;
      state->indexed_tokens[threadIdx.x % 32] = theirs.token_indexed ? theirs.count : -1;
      if (call.lane.shared_experts > 0) note_rank_tokens(call.lane, theirs.count);
    }
    const std::uint32_t direct_write_peers = __ballot_sync(~0u, is_rank && theirs.accepts_direct_writes),
                        direct_writers = __ballot_sync(~0u, is_rank && theirs.direct_write);
    const SourceSegments segments = SourceSegments::of(is_rank ? theirs.log2_segments : 0);
    const bool limits_rows = __any_sync(~0u, is_rank && theirs.limits_rows) != 0;
    if (threadIdx.x % 32 == 0) {
      state->limits_rows = limits_rows;
      state->segments = segments;
      state->direct_write_peers = state->header.facts.direct_write ? direct_write_peers : 0;
      state->direct_writers = state->header.facts.accepts_direct_writes ? direct_writers : 0;
    }
  }
  const CountSource<Traits> counts{call, BlockTables::of(call), state->number};
  return compute_row_offsets(counts, RowOffsets::of(call), &state->scratch, agreed, all_ranks,
                             coordinates && !Traits::by_plan(call));
}

// [threads] Gives an aborted call an empty result, because the caller's next kernels read it. `threads`: how
// many threads call it.
static __device__ __noinline__ void clear_received(const DispatchArguments& call, int thread, int threads) {
  for (int group = thread; group <= call.lane.groups; group += threads) {
    if (group < call.lane.groups) call.counts[group] = 0;
    call.row_offsets[group] = 0;
  }
}

// [thread] Publishes the total of rows to the host.
__device__ inline void publish_totals(const LaneView& lane, std::uint64_t number, std::int64_t total) {
  static_assert(sizeof(HostTotals) == sizeof(LLPacket));
  // One 16-byte store, which CUDA does not split on its way to mapped host memory if it is aligned
  // (programming guide, mapped memory). The host reads the call number first, so it never sees the number
  // without its total.
  // The host counts a gather as one call, however many rounds it has run.
  const std::uint64_t rounds = lane.has_gathered ? lane.state->further_rounds : 0;
  store_packet_relaxed_sys(reinterpret_cast<LLPacket*>(lane.totals),
                           {number - rounds, static_cast<std::uint64_t>(total)});
}

// [thread] Rows that `rank` has room for: its capacity, or the row limit in its header if that is lower.
__device__ __forceinline__ std::int64_t room_at(const DispatchArguments& call, int rank) {
  const DispatchBlockState& state = *block_state();
  const std::int64_t capacity = BlockTables::of(call).capacity[rank];
  std::uint64_t limit = 0;
  const bool known = state.limits_rows && await_header_word(call.lane, state.number, Operation::dispatch,
                                                            rank, kHeaderOptions + kRowLimitOption, &limit);
  return known && limit > 0 ? min(capacity, static_cast<std::int64_t>(limit)) : capacity;
}

// [block] Whether a rank is sent more rows than it has room for, in a call with row limits.
static __device__ __noinline__ bool exceeds_room(const DispatchArguments& call) {
  const ScanScratch& scratch = block_state()->scratch;
  bool exceeds = scratch.dropped > 0;
  for (int rank = static_cast<int>(threadIdx.x); rank < call.lane.ranks; rank += static_cast<int>(blockDim.x))
    exceeds = exceeds || static_cast<std::int64_t>(scratch.needed[rank]) > room_at(call, rank);
  return __syncthreads_or(static_cast<int>(exceeds)) != 0;
}

// [thread] The most overfull rank; ties: the lowest.
static __device__ __noinline__ Overflow worst_overflow(const DispatchArguments& call) {
  const ScanScratch& scratch = block_state()->scratch;
  const BlockTables tables = BlockTables::of(call);
  Overflow worst;
  worst.dropped = static_cast<std::int64_t>(scratch.dropped);
  for (int rank = 0; rank < call.lane.ranks; ++rank) {
    const auto needed = static_cast<std::int64_t>(scratch.needed[rank]);
    const std::int64_t room = room_at(call, rank);
    if (needed <= room) continue;
    worst.dropped += min(needed, tables.capacity[rank]) - room;
    if (needed <= worst.needed) continue;
    worst.rank = rank;
    worst.capacity = room;
    worst.needed = needed;
  }
  return worst;
}

// [block] The coordinator's output once row offsets are known: the caller's counts and row offsets, the
// host's total, and the plan's header and message counts.
static __device__ __noinline__ void publish_row_offsets(const DispatchArguments& call) {
  const DispatchBlockState& state = *block_state();
  const LaneView& lane = call.lane;
  const RowOffsets offsets = RowOffsets::of(call);
  const PlanView& plan = call.plan;
  for (int group = threadIdx.x; group <= lane.groups; group += blockDim.x) {
    if (group < lane.groups) {
      const std::int32_t count = offsets.group_count[group];
      call.counts[group] = count;
      if (call.count_sums != nullptr) call.count_sums[group] += count;
    }
    call.row_offsets[group] = offsets.group_begin[group];
  }
  if (threadIdx.x == blockDim.x - 1) publish_totals(lane, state.number, offsets.group_begin[lane.groups]);
  if (call.by_plan) return;
  // In wide kernels load_messages_wide() has stored them.
  for (int i = threadIdx.x; !kWide && i < lane.ranks * lane.ranks; i += blockDim.x)
    plan.tokens_between[i] = offsets.messages[i];
  if (lane.shared_experts > 0 && static_cast<int>(threadIdx.x) < lane.ranks)
    plan.rank_tokens[threadIdx.x] = state.rank_tokens[threadIdx.x];
  const bool overflows = state.limits_rows ? exceeds_room(call) : state.scratch.dropped > 0;
  if (threadIdx.x != 0) return;
  write_plan_header(
      plan.header, lane, state.epoch, state.number,
      {state.tokens, offsets.group_begin[lane.groups], static_cast<std::int64_t>(state.scratch.dropped)});
  if (overflows) {
    DeviceDiagnostics& found = lane.state->diagnostics;
    record_findings(&found.overflows, 1, [&] { found.overflow = worst_overflow(call); });
  }
  lane.state->dispatches += 1;
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
