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
  }
  return await_all_headers_wide(call.lane, state->number, state->header, coordinates,
                                [&](int rank, const HeaderFacts& theirs) {
                                  state->sender_warps[rank] = theirs.sender_warps;
                                  state->indexed_tokens[rank] = theirs.token_indexed ? theirs.count : -1;
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
    if (threadIdx.x % 32 == 0) {
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
  if (threadIdx.x != 0) return;
  write_plan_header(plan.header, lane, state.number, state.tokens, offsets.group_begin[lane.groups],
                    static_cast<std::int64_t>(state.scratch.dropped));
  if (state.scratch.dropped > 0) {
    DeviceDiagnostics& found = lane.state->diagnostics;
    record_findings(&found.overflows, 1,
                    [&] { found.overflow = worst_overflow(lane, BlockTables::of(call), state.scratch); });
  }
  lane.state->dispatches += 1;
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
