// Counts a call's routes and messages: for each work warp those before its tokens, and in one block the
// totals, which it posts in the call header.
#pragma once

#include "backends/cuda/dispatch/block_state.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// The id of this thread's slot of token `token`; -1 from token `end` on.
__device__ __forceinline__ RawId load_id(const DispatchArguments& call, std::int64_t token,
                                         std::int64_t end) {
  const int slot = TokenTile::of(call.lane.top_k).slot();
  return token < end && slot < call.lane.top_k ? RawId::at(call, token * call.lane.top_k + slot) : RawId{};
}

// The next ids that this thread counts, loaded ahead of their use.
struct IdPrefetch {
  static constexpr int kDepth = 4;
  RawId ids[kDepth];

  // Prefetches ids of tokens in [begin, end): the block's tiles take consecutive tokens.
  __device__ __forceinline__ static IdPrefetch of(const DispatchArguments& call, std::int64_t begin,
                                                  std::int64_t end) {
    const int log2_size = TokenTile::of(call.lane.top_k).log2_size;
    const std::int64_t first = begin + (static_cast<int>(threadIdx.x) >> log2_size);
    IdPrefetch prefetch;
#pragma unroll
    for (int i = 0; i < kDepth; ++i)
      prefetch.ids[i] = load_id(call, first + i * (static_cast<int>(blockDim.x) >> log2_size), end);
    return prefetch;
  }
  // Returns the first id and appends `next`.
  __device__ __forceinline__ RawId shift(RawId next) {
    const RawId first = ids[0];
#pragma unroll
    for (int i = 0; i + 1 < kDepth; ++i) ids[i] = ids[i + 1];
    ids[kDepth - 1] = next;
    return first;
  }
};

// Tokens [begin, end).
struct TokenRange {
  std::int32_t begin, end;
};

// [block] Adds the routes and messages of `tokens` to the counts that counts_of(token) returns, and their bad
// ids to `bad` unless it is null. `ids`: from the first token on. Call __syncthreads() before the counts are
// read.
template <class Traits, class CountsOf>
__device__ __forceinline__ void count_tokens(const DispatchArguments& call, const BlockTables& tables,
                                             const TokenRange& tokens, IdPrefetch ids, BadIdCount* bad,
                                             CountsOf counts_of) {
  const LaneView& lane = call.lane;
  const TokenTile tile = TokenTile::of(lane.top_k);
  const int slot = tile.slot(), first_messages = lane.signals.first_messages,
            step = static_cast<int>(blockDim.x) >> tile.log2_size;
  const std::int32_t end = tokens.end;
  std::int32_t token = tokens.begin + (static_cast<std::int32_t>(threadIdx.x) >> tile.log2_size);
#pragma unroll 1
  for (; token - tile.index() < end; token += step) {
    const RawId raw = ids.shift(load_id(call, token + IdPrefetch::kDepth * step, end));
    const std::int64_t id = token < end ? raw.value(call) : -1;
    std::int32_t* counts = counts_of(min(token, end - 1));
    std::uint32_t rank_bit = 0;
    int destination = -1;
    const IdKind kind = classify_id(id, lane.experts);
    if (kind == IdKind::expert) {
      const int physical = tables.physical_of[id], rank = tables.rank_of[physical];
      if (plans_route<Traits>(lane, rank)) {
        if constexpr (kWide) {
          destination = rank;
        } else {
          rank_bit = 1u << rank;
        }
        add_in_block(&counts[physical], 1);
      }
    } else if (bad != nullptr && kind == IdKind::bad) {
      atomicAdd(&bad->count, 1ull);
      atomicMin(&bad->lowest_route, static_cast<unsigned long long>(std::int64_t{token} * lane.top_k + slot));
    }
    if constexpr (kWide) {
      // The first slot of the token at each rank counts its message.
      const int me = static_cast<int>(threadIdx.x % 32);
      const std::uint32_t same =
          __match_any_sync(~0u, destination >= 0 ? destination : -1 - me) & tile.mask(tile.index());
      if (destination >= 0 && (same & ((1u << me) - 1)) == 0)
        add_in_block(&counts[first_messages + destination], 1);
      continue;
    }
    std::uint32_t ranks;
    if constexpr (Traits::kToEveryRank) {
      ranks = token < end ? ~0u : 0;
    } else {
      ranks = tile.reduce_or(rank_bit);
    }
    for (int r = slot; r < lane.ranks; r += tile.size()) {
      if ((ranks >> r & 1) != 0) add_in_block(&counts[first_messages + r], 1);
    }
  }
}

// From this many tokens on, each counting block counts its own tokens and the blocks exchange sums. With
// fewer tokens each block counts all the tokens that it needs.
inline constexpr std::int64_t kSharedCountTokens = 1024;

// [thread] Records the call's bad ids for check().
static __device__ __noinline__ void record_bad_ids(const DispatchArguments& call, const BadIdCount& bad) {
  if (bad.count == 0) return;
  DeviceDiagnostics& found = call.lane.state->diagnostics;
  record_findings(&found.bad_ids, bad.count, [&] {
    found.first_bad_id_route = static_cast<std::int64_t>(bad.lowest_route);
    found.first_bad_id = id_at(call, found.first_bad_id_route);
  });
}

// [block] Exchanges sums among the `blocks` counting blocks, whose warps have counted their own tokens:
// publishes the sums of this one, `block`, and adds up those of the blocks before it and of all. False, in
// all threads alike: the exchange has failed, and there are no sums.
[[nodiscard]] static __device__ __noinline__ bool exchange_block_counts(const DispatchArguments& call,
                                                                        int block, int blocks) {
  const LaneView& lane = call.lane;
  const RouteCounts counts = route_counts_of(call);
  DispatchBlockState* const state = block_state();
  std::int32_t* sums = lane.block_counts + std::int64_t{block} * counts.stride;
  for (int i = threadIdx.x; i < counts.stride; i += blockDim.x) {
    std::int32_t sum = 0;
    for (int warp = 0; warp < kWorkWarps; ++warp) sum += counts.of_warp(warp)[i];
    sums[i] = sum;
  }
  if (threadIdx.x == 0 && state->bad.count > 0) {
    atomicAdd(&lane.state->bad_ids, state->bad.count);
    atomicMin(&lane.state->lowest_bad_id, state->bad.lowest_route);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    inject_fault(lane, KernelPoint::counts);
    // Release at gpu scope: orders the sums of all threads, by the barrier, before the block's flag.
    store_release_gpu(&lane.block_counted[block], state->number);
  }
  // Acquire, by a thread for each block; the barrier then orders all threads' reads of the sums after it.
  bool counted = true;
  for (int other = threadIdx.x; other < blocks && counted; other += blockDim.x)
    counted =
        wait_local_flag(lane, &lane.block_counted[other], {Operation::dispatch, state->number, lane.rank});
  if (__syncthreads_and(static_cast<int>(counted)) == 0) return false;
  for (int i = threadIdx.x; i < counts.stride; i += blockDim.x) {
    std::int32_t before = 0, all = 0;
#pragma unroll 8
    for (int other = 0; other < blocks; ++other) {
      const std::int32_t sum = lane.block_counts[std::int64_t{other} * counts.stride + i];
      all += sum;
      if (other < block) before += sum;
    }
    counts.earlier_blocks()[i] = before;
    counts.total()[i] = all;
  }
  if (block == blocks - 1 && threadIdx.x == 0) {
    state->bad = {lane.state->bad_ids, lane.state->lowest_bad_id};
    lane.state->bad_ids = 0;
    lane.state->lowest_bad_id = ~0ull;
  }
  return true;
}

// [block] Counts for block `block` of the `blocks` that share the tokens: each warp's row gets the counts of
// all tokens before the warp's first. `counts_all`, for the last block alone: also adds up the totals.
// `first`: the ids from token 0 on. Returns false in all threads if the exchange has failed.
template <class Traits>
[[nodiscard]] static __device__ __forceinline__ bool count_block_routes(const DispatchArguments& call,
                                                                        int block, int blocks,
                                                                        bool counts_all,
                                                                        const IdPrefetch& first) {
  DispatchBlockState* const state = block_state();
  const RouteCounts counts = route_counts_of(call);
  const SendPartition partition = state->partition;
  const int first_worker = block * kWorkWarps;
  static_assert(kManyTokens <= kSharedCountTokens);
  const bool together = !Traits::kFewTokens && blocks > 1 && partition.tokens >= kSharedCountTokens;
  const std::int32_t begin = partition.token_begin(first_worker),
                     end = partition.token_begin(first_worker + kWorkWarps);
  const std::int32_t from = together ? begin : 0, until = counts_all ? partition.tokens : end;
  count_tokens<Traits>(call, BlockTables::of(call), {from, until},
                       from == 0 ? first : IdPrefetch::of(call, from, until),
                       together || counts_all ? &state->bad : nullptr, [&](std::int32_t token) {
                         return token < begin ? counts.earlier_blocks()
                                              : counts.of_warp(partition.last_worker(token) - first_worker);
                       });
  __syncthreads();
  if (together && !exchange_block_counts(call, block, blocks)) return false;
  // Turns counts into prefix sums. The barrier above is before all reads, and each thread reads what it has
  // itself written since: no further one is needed.
  for (int i = threadIdx.x; i < counts.stride; i += blockDim.x) {
    std::int32_t before = counts.earlier_blocks()[i], own[kWorkWarps];
#pragma unroll
    for (int w = 0; w < kWorkWarps; ++w) own[w] = counts.of_warp(w)[i];
#pragma unroll
    for (int w = 0; w < kWorkWarps; ++w) {
      counts.of_warp(w)[i] = before;
      before += own[w];
    }
    if (!together) counts.total()[i] = before;
  }
  __syncthreads();
  return true;
}

// [block] Adds up the totals, in a block without tokens of its own.
template <class Traits>
static __device__ __forceinline__ void count_all_routes(const DispatchArguments& call,
                                                        const IdPrefetch& first) {
  DispatchBlockState* const state = block_state();
  count_tokens<Traits>(call, BlockTables::of(call), {0, state->partition.tokens}, first, &state->bad,
                       [&](std::int32_t) { return route_counts_of(call).total(); });
  __syncthreads();
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
