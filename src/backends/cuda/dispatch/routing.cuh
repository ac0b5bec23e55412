// The only device code that reads ids: which tokens a warp sends, and how many routes and messages come
// before them.
#pragma once

#include "backends/cuda/device/block_arrays.cuh"
#include "backends/cuda/device/routing_tables.hpp"
#include "backends/cuda/dispatch/dispatch.hpp"
#include "backends/cuda/dispatch/send_share.hpp"
#include "backends/cuda/protocol/flag_publisher.cuh"
#include "layout/plan_layout.hpp"

namespace ferry::cuda {

// The lane's tables on their way to the block's shared memory, by the whole block: asked for, then stored.
struct TableWords {
  static constexpr int kEach = static_cast<int>(
      (RoutingTables::bytes(kMaxExperts, kMaxRanks) / 16 + kBlockThreads - 1) / kBlockThreads);
  uint4 held[kEach];

  __device__ __forceinline__ static unsigned at(int i) { return threadIdx.x + i * unsigned{kBlockThreads}; }
  __device__ __forceinline__ void load(const LaneView& lane) {
    const auto words = static_cast<unsigned>(RoutingTables::bytes(lane.experts, lane.ranks)) / 16;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (at(i) < words) held[i] = reinterpret_cast<const uint4*>(lane.tables)[at(i)];
    }
  }
  // A barrier follows.
  __device__ __forceinline__ void store(const LaneView& lane, std::byte* memory) const {
    const auto words = static_cast<unsigned>(RoutingTables::bytes(lane.experts, lane.ranks)) / 16;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (at(i) < words) reinterpret_cast<uint4*>(memory)[at(i)] = held[i];
    }
  }
};

__device__ __forceinline__ const std::byte* token_row(const DispatchArguments& call, int part,
                                                      std::int64_t token) {
  return call.part[part] + token * call.stride[part];
}

__device__ __forceinline__ std::int64_t id_at(const DispatchArguments& call, std::int64_t route) {
  return call.wide_ids ? static_cast<const std::int64_t*>(call.ids)[route]
                       : static_cast<const std::int32_t*>(call.ids)[route];
}

// An id as it lies. What it says is asked later: a load is waited for where its value is first needed.
struct RawId {
  std::uint32_t low = ~0u, high = ~0u;  // -1

  __device__ __forceinline__ static RawId at(const DispatchArguments& call, std::int64_t route) {
    const auto* words = static_cast<const std::uint32_t*>(call.ids);
    const std::int64_t at = call.wide_ids ? 2 * route : route;
    RawId id{words[at], 0};
    if (call.wide_ids) id.high = words[at + 1];
    return id;
  }
  __device__ __forceinline__ std::int64_t value(const DispatchArguments& call) const {
    return call.wide_ids ? static_cast<std::int64_t>(low | std::uint64_t{high} << 32)
                         : static_cast<std::int32_t>(low);
  }
};

__device__ __forceinline__ bool is_expert(const LaneView& lane, std::int64_t id) {
  return id >= 0 && id < lane.experts;
}

// Some of a warp's threads, one for each slot of a token: the warp's teams have a token each.
struct Team {
  int shift;  // 8, 16 or 32 threads: as many as a token has slots, or a few more

  __device__ static Team of(int top_k) { return {top_k <= 8 ? 3 : top_k <= 16 ? 4 : 5}; }
  __device__ int size() const { return 1 << shift; }
  __device__ int count() const { return 32 >> shift; }
  __device__ int mine() const { return static_cast<int>(threadIdx.x % 32) >> shift; }
  __device__ int slot() const { return static_cast<int>(threadIdx.x) & (size() - 1); }
  // The thread in `threads` (one bit each) that is this team's, each having one; 32 or more: none is left.
  __device__ std::uint32_t nth_of(std::uint32_t threads) const {
    for (int t = mine(); t > 0; --t) threads &= threads - 1;
    return static_cast<std::uint32_t>(__ffs(static_cast<int>(threads)) - 1);
  }
  // What the threads of this thread's team have together. By the whole warp: threads of a mask of their own
  // would take turns, team by team.
  __device__ __forceinline__ std::uint32_t together(std::uint32_t bits) const {
#pragma unroll
    for (int step = 0; step < 5; ++step) {
      if (step < shift) bits |= __shfl_xor_sync(~0u, bits, 1 << step);
    }
    return bits;
  }
  // The threads of a team, one bit each.
  __device__ std::uint32_t threads(int team) const { return (~0u >> (32 - size())) << (team << shift); }
};

// A thread's slot of its team's token, as the caller brings it; -1 from token `end` on.
struct SlotRoute {
  RawId id;
  float weight = 0;

  __device__ __forceinline__ static SlotRoute of(const DispatchArguments& call, const Team& team,
                                                 std::int64_t first, std::int64_t end) {
    const std::int64_t token = first + team.mine();
    if (token >= end || team.slot() >= call.lane.top_k) return {};
    const std::int64_t route = token * call.lane.top_k + team.slot();
    return {RawId::at(call, route), call.weights != nullptr ? call.weights[route] : 0.0f};
  }
};

// Ids of a call that are no experts: how many, and the lowest route with one.
struct BadIds {
  unsigned long long number, lowest;
};

// Counts of a sending block, in its shared memory. A row for each warp: first its own tokens', then all
// before its first token's, which it goes on counting from.
struct SendCounts {
  std::int32_t* memory;
  int stride;

  // A multiple of 16.
  static __host__ __device__ constexpr std::int64_t bytes(const DeviceSignals& signals) {
    return (4 * std::int64_t{kWorkWarps + 2} * 2 * signals.count_words + 15) / 16 * 16;
  }
  // By the whole block; a barrier follows.
  __device__ void clear(const DeviceSignals& signals) const {
    for (unsigned i = threadIdx.x; i < bytes(signals) / 16; i += blockDim.x)
      reinterpret_cast<uint4*>(memory)[i] = make_uint4(0, 0, 0, 0);
  }
  __device__ std::int32_t* of_warp(int warp) const { return memory + warp * stride; }
  __device__ std::int32_t* before() const { return of_warp(kWorkWarps); }  // of the blocks before
  __device__ std::int32_t* all() const { return of_warp(kWorkWarps + 1); }
};

// The id that a thread of those that count has of its team's token, -1 past the last.
__device__ __forceinline__ RawId counted_id(const DispatchArguments& call, std::int64_t token,
                                            std::int64_t end) {
  const int slot = Team::of(call.lane.top_k).slot();
  return token < end && slot < call.lane.top_k ? RawId::at(call, token * call.lane.top_k + slot) : RawId{};
}
// Those of the next tokens it counts.
struct CountedIds {
  static constexpr int kAhead = 4;
  RawId ahead[kAhead];

  // Of tokens from this thread's in `begin` on, which are before `end`.
  __device__ __forceinline__ static CountedIds of(const DispatchArguments& call, std::int64_t begin,
                                                  std::int64_t end) {
    const int shift = Team::of(call.lane.top_k).shift;
    const std::int64_t first = begin + (static_cast<int>(threadIdx.x) >> shift);
    CountedIds ids;
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      ids.ahead[i] = counted_id(call, first + i * (static_cast<int>(blockDim.x) >> shift), end);
    return ids;
  }
  // The first; `next` goes last.
  __device__ __forceinline__ RawId take(RawId next) {
    const RawId first = ahead[0];
#pragma unroll
    for (int i = 0; i + 1 < kAhead; ++i) ahead[i] = ahead[i + 1];
    ahead[kAhead - 1] = next;
    return first;
  }
};

// By the threads of a block: adds tokens [begin, end) to the rows of counts that `row_of` names for each, and
// their bad ids to `bad` if given. `ids`: of token `begin` and later ones, perhaps past the end. A barrier
// must follow before the counts are read.
template <class RowOf>
__device__ __forceinline__ void count_tokens(const DispatchArguments& call, const BlockTables& tables,
                                             std::int32_t begin, std::int32_t end, CountedIds ids,
                                             BadIds* bad, RowOf row_of) {
  const LaneView& lane = call.lane;
  const Team team = Team::of(lane.top_k);
  const int slot = team.slot(), first_messages = lane.signals.first_messages,
            step = static_cast<int>(blockDim.x) >> team.shift;
  std::int32_t token = begin + (static_cast<std::int32_t>(threadIdx.x) >> team.shift);
#pragma unroll 1
  for (; token - team.mine() < end; token += step) {
    const RawId id = ids.take(counted_id(call, token + CountedIds::kAhead * step, end));
    const std::int64_t now = token < end ? id.value(call) : -1;
    std::int32_t* counts = row_of(min(token, end - 1));
    std::uint32_t rank = 0;  // as a bit
    if (is_expert(lane, now)) {
      const int position = tables.position_of[now];
      rank = 1u << tables.rank_of[position];
      add_in_block(&counts[position], 1);
    } else if (bad != nullptr && now != -1) {
      atomicAdd(&bad->number, 1ull);
      atomicMin(&bad->lowest, static_cast<unsigned long long>(std::int64_t{token} * lane.top_k + slot));
    }
    const std::uint32_t ranks = team.together(rank);
    for (int r = slot; r < lane.ranks; r += team.size()) {
      if ((ranks >> r & 1) != 0) add_in_block(&counts[first_messages + r], 1);
    }
  }
}

// A thread's slot of its team's token, planned.
struct PlannedSlot {
  std::int32_t id = -1, position = -1, rank = -1;  // -1: masked or bad
  std::int32_t ordinal = 0;                        // routes of this source to the same expert before it
  std::int32_t message = 0;                        // number of the token's message to that rank
  std::uint32_t peers = 0;                         // threads with slots of the token at the same rank
  std::uint32_t ranks = 0;                         // destinations of the token, one bit each
  bool leads = false;                              // the first of its peers
};

// By one warp: a token for each team, in order, whose slot `id` is this thread's. `counts`: of the warp.
__device__ __forceinline__ PlannedSlot plan_tokens(const LaneView& lane, const BlockTables& tables,
                                                   const Team& team, std::int32_t* counts, std::int64_t id) {
  const int me = static_cast<int>(threadIdx.x % 32);
  const std::uint32_t lower = (1u << me) - 1, higher = ~lower - (1u << me);
  std::int32_t* const messages = counts + lane.signals.first_messages;
  PlannedSlot slot;
  if (is_expert(lane, id)) {
    slot.id = static_cast<std::int32_t>(id);
    slot.position = tables.position_of[id];
    slot.rank = tables.rank_of[slot.position];
    slot.ordinal = counts[slot.position];
    slot.message = messages[slot.rank];
  }
  const bool has = slot.position >= 0;
  const std::uint32_t same = __match_any_sync(~0u, has ? slot.position : -1 - me);
  const std::uint32_t toward = __match_any_sync(~0u, has ? slot.rank : -1 - me);
  slot.peers = toward & team.threads(team.mine());
  slot.leads = has && (slot.peers & lower) == 0;
  slot.ranks = team.together(has ? 1u << slot.rank : 0);
  const std::uint32_t leaders = toward & __ballot_sync(~0u, slot.leads);
  slot.ordinal += __popc(static_cast<int>(same & lower));
  slot.message += __popc(static_cast<int>(leaders & ((1u << team.mine() * team.size()) - 1)));
  // All have read; the last of a kind says how many there are.
  __syncwarp();
  if (has && (same & higher) == 0) counts[slot.position] = slot.ordinal + 1;
  if (slot.leads && (leaders & higher) == 0) messages[slot.rank] = slot.message + 1;
  __syncwarp();
  return slot;
}

}  // namespace ferry::cuda
