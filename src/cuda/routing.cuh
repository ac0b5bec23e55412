// The only device code that reads ids: which tokens a warp sends, and how many routes and messages come
// before them.
#pragma once

#include "cuda/announce.cuh"
#include "cuda/dispatch.hpp"
#include "cuda/routing_tables.hpp"
#include "layout/plan_layout.hpp"

namespace ferry::cuda {

// By the whole block: the lane's tables to its shared memory; a barrier follows.
__device__ inline void copy_tables(const LaneView& lane, std::byte* memory) {
  const auto words = static_cast<unsigned>(RoutingTables::bytes(lane.experts, lane.ranks) / 16);
  const auto* from = reinterpret_cast<const uint4*>(lane.tables);
  for (unsigned i = threadIdx.x; i < words; i += blockDim.x) reinterpret_cast<uint4*>(memory)[i] = from[i];
}

__device__ __forceinline__ const std::byte* token_row(const DispatchArguments& call, int part,
                                                      std::int64_t token) {
  return call.part[part] + token * call.stride[part];
}

__device__ __forceinline__ std::int64_t id_at(const DispatchArguments& call, std::int64_t route) {
  return call.wide_ids ? static_cast<const std::int64_t*>(call.ids)[route]
                       : static_cast<const std::int32_t*>(call.ids)[route];
}

__device__ __forceinline__ bool is_expert(const LaneView& lane, std::int64_t id) {
  return id >= 0 && id < lane.experts;
}

// Eight ids, where they lie so four at a time; -1 past the token's last.
__device__ __forceinline__ void load_ids(const DispatchArguments& call, std::int64_t token, int first,
                                         std::int64_t (&id)[8]) {
  const int top_k = call.lane.top_k;
  const std::int64_t route = token * top_k + first;
  if (!call.wide_ids && top_k % 8 == 0 && reinterpret_cast<std::uintptr_t>(call.ids) % 16 == 0) {
    const auto* from = reinterpret_cast<const int4*>(static_cast<const std::int32_t*>(call.ids) + route);
    const int4 low = from[0], high = from[1];
    id[0] = low.x, id[1] = low.y, id[2] = low.z, id[3] = low.w;
    id[4] = high.x, id[5] = high.y, id[6] = high.z, id[7] = high.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) id[i] = first + i < top_k ? id_at(call, route + i) : -1;
}

// Ids of a call that are no experts: how many, and the lowest route with one.
struct BadIds {
  unsigned long long number, lowest;
};

// By how many halvings of `rows` rows all of `workers` warps have work, as far as quarters go.
__device__ __forceinline__ int splits_of(std::int64_t rows, int workers) {
  return 4 * rows <= workers ? 2 : 2 * rows <= workers ? 1 : 0;
}
static_assert(kQuarters == 4);

// How tokens are shared out: in units, each a share of a token's row; every warp sends a run of them.
struct SendShare {
  std::int32_t tokens;
  int splits;               // a token's row is shared by 1 << splits warps, 1, 2 or 4
  int workers;              // warps that send, in all blocks
  std::int32_t each, more;  // units of a warp, and how many have one more

  __device__ static SendShare of(std::int64_t tokens, int senders) {
    SendShare share{static_cast<std::int32_t>(tokens), 0, senders * kWorkWarps, 0, 0};
    share.splits = splits_of(tokens, share.workers);
    const std::int32_t units = share.tokens << share.splits;
    share.each = units / share.workers;
    share.more = units - share.each * share.workers;
    return share;
  }
  __device__ std::int32_t unit_begin(int worker) const { return worker * each + min(worker, more); }
  __device__ std::int32_t token_begin(int worker) const { return unit_begin(worker) >> splits; }
  // The last worker whose units begin with this token or before: token_begin(worker) <= token.
  __device__ int last_worker(std::int32_t token) const {
    const std::int32_t unit = (token << splits) + (1 << splits) - 1, longer = more * (each + 1);
    return unit < longer ? unit / (each + 1) : more + (unit - longer) / each;
  }
};

// Counts of a sending block, in its shared memory. A row for each warp: first its own tokens', then all
// before its first token's, which it goes on counting from.
struct SendCounts {
  std::int32_t* memory;
  int stride;

  static __host__ __device__ constexpr std::int64_t bytes(const DeviceSignals& signals) {
    return 4 * std::int64_t{kWorkWarps + 2} * 2 * signals.count_words();
  }
  __device__ std::int32_t* of_warp(int warp) const { return memory + warp * stride; }
  __device__ std::int32_t* before() const { return of_warp(kWorkWarps); }  // of the blocks before
  __device__ std::int32_t* all() const { return of_warp(kWorkWarps + 1); }
};

// By the threads of a block: adds tokens [begin, end) to the rows of counts that `row_of` names for each, and
// their bad ids to `bad` if given. A barrier must follow before the counts are read.
template <class RowOf>
__device__ __forceinline__ void count_tokens(const DispatchArguments& call, const RoutingTables& tables,
                                             std::int32_t begin, std::int32_t end, BadIds* bad,
                                             RowOf row_of) {
  const LaneView& lane = call.lane;
  const int mine = static_cast<int>(threadIdx.x % 32);
#pragma unroll 1
  for (std::int32_t base = begin + static_cast<std::int32_t>(threadIdx.x) - mine; base < end;
       base += static_cast<std::int32_t>(blockDim.x)) {
    const std::int32_t token = base + mine;
    std::int32_t* counts = row_of(min(token, end - 1));
    std::uint32_t ranks = 0;
#pragma unroll 1
    for (int slot = 0; slot < lane.top_k && token < end; slot += 8) {
      std::int64_t id[8];
      load_ids(call, token, slot, id);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (is_expert(lane, id[i])) {
          const int position = tables.position_of[id[i]];
          atomicAdd(&counts[position], 1);
          ranks |= 1u << tables.rank_of[position];
        } else if (bad != nullptr && id[i] != -1) {
          atomicAdd(&bad->number, 1ull);
          atomicMin(&bad->lowest,
                    static_cast<unsigned long long>(std::int64_t{token} * lane.top_k + slot + i));
        }
      }
    }
    // Everybody's token may go to the same rank: counted by votes of those with the same row.
    const std::uint32_t together = __match_any_sync(~0u, reinterpret_cast<unsigned long long>(counts));
    const bool counts_votes = (together & ((1u << mine) - 1)) == 0;
#pragma unroll 1
    for (int rank = 0; rank < lane.ranks; ++rank) {
      const int votes = __popc(static_cast<int>(__ballot_sync(~0u, ranks >> rank & 1) & together));
      if (counts_votes && votes > 0) atomicAdd(&counts[lane.signals.first_messages() + rank], votes);
    }
  }
}

// A token as its warp has planned it; this thread's slot and rank.
struct PlannedToken {
  std::int32_t id = -1, position = -1, rank = -1;  // of the slot; -1: masked or bad
  std::int32_t ordinal = 0;                        // routes of this source to the same expert before it
  std::uint32_t ranks = 0;                         // destinations, one bit each
  std::int32_t message = 0;                        // number of the message to this thread's rank
};

// By one warp: the token whose slot `id` is this thread's. `counts`: of the warp; `messages`: to this
// thread's rank so far.
__device__ inline PlannedToken plan_token(const LaneView& lane, const RoutingTables& tables,
                                          std::int32_t* counts, std::int64_t id, std::int32_t* messages) {
  const int slot = static_cast<int>(threadIdx.x % 32);
  PlannedToken token;
  if (is_expert(lane, id)) {
    token.id = static_cast<std::int32_t>(id);
    token.position = tables.position_of[id];
    token.rank = tables.rank_of[token.position];
    token.ordinal = counts[token.position];
  }
  token.ranks = __reduce_or_sync(~0u, token.rank >= 0 ? 1u << token.rank : 0);
  const std::uint32_t same = __match_any_sync(~0u, token.position >= 0 ? token.position : -1 - slot);
  const std::uint32_t earlier = same & ((1u << slot) - 1);
  token.ordinal += __popc(static_cast<int>(earlier));
  __syncwarp();
  if (token.position >= 0 && earlier == 0)
    counts[token.position] = token.ordinal + __popc(static_cast<int>(same));
  token.message = *messages;
  *messages += static_cast<std::int32_t>(token.ranks >> slot & 1);
  __syncwarp();
  return token;
}

}  // namespace ferry::cuda
