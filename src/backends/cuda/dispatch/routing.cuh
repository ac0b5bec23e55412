// Reads a dispatch's expert ids and plans each slot; count_routes.cuh counts them.
#pragma once

#include <cstdint>

#include "backends/cuda/dispatch/block_arrays.cuh"
#include "backends/cuda/dispatch/dispatch.hpp"
#include "backends/cuda/protocol/flag_publisher.cuh"
#include "layout/plan_layout.hpp"
#include "plan/slot.hpp"

namespace ferry::cuda {

struct TokenTile {
  int log2_size;  // the smallest of 8, 16 and 32 threads that has a thread for each of a token's slots

  __device__ static TokenTile of(int top_k) { return {top_k <= 8 ? 3 : top_k <= 16 ? 4 : 5}; }
  __device__ int size() const { return 1 << log2_size; }       // threads
  __device__ int per_warp() const { return 32 >> log2_size; }  // tiles, and so tokens, of a warp
  __device__ int index() const {
    return static_cast<int>(threadIdx.x % 32) >> log2_size;
  }  // of this thread's tile
  __device__ int slot() const { return static_cast<int>(threadIdx.x) & (size() - 1); }
  // The n-th set bit of `threads`, n being this thread's tile: hands each tile a thread of the set. 32 or
  // more when the set has fewer threads.
  __device__ std::uint32_t nth_thread(std::uint32_t threads) const {
    for (int t = index(); t > 0; --t) threads &= threads - 1;
    return static_cast<std::uint32_t>(__ffs(static_cast<int>(threads)) - 1);
  }
  // [warp] The bitwise or of `bits` over this thread's tile. All threads shuffle together: with a mask for
  // each tile, the tiles would run one after the other.
  __device__ __forceinline__ std::uint32_t reduce_or(std::uint32_t bits) const {
#pragma unroll
    for (int step = 0; step < 5; ++step) {
      if (step < log2_size) bits |= __shfl_xor_sync(~0u, bits, 1 << step);
    }
    return bits;
  }
  // The threads of tile `tile`, one bit each.
  __device__ std::uint32_t mask(int tile) const { return (~0u >> (32 - size())) << (tile << log2_size); }
};

}  // namespace ferry::cuda

namespace ferry::cuda::inline FERRY_WIDTH {

__device__ __forceinline__ const std::byte* token_row(const DispatchArguments& call, int part,
                                                      std::int64_t token) {
  return call.part[part] + token * call.stride[part];
}

__device__ __forceinline__ std::int64_t id_at(const DispatchArguments& call, std::int64_t route) {
  return call.wide_ids ? static_cast<const std::int64_t*>(call.ids)[route]
                       : static_cast<const std::int32_t*>(call.ids)[route];
}

// An id as it lies in memory. It is decoded as late as possible: the first use of a loaded value waits for
// the load.
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

// The caller's id and weight of this thread's slot; id -1 from token `end` on.
struct InputSlot {
  RawId id;
  float weight = 0;

  // The slot of the tile's token, when the warp's first tile has token `first`.
  __device__ __forceinline__ static InputSlot of(const DispatchArguments& call, const TokenTile& tile,
                                                 std::int64_t first, std::int64_t end) {
    const std::int64_t token = first + tile.index();
    if (token >= end || tile.slot() >= call.lane.top_k) return {};
    const std::int64_t route = token * call.lane.top_k + tile.slot();
    return {RawId::at(call, route), call.weights != nullptr ? call.weights[route] : 0.0f};
  }
};

// Bad ids of a call, and the lowest route that has one.
struct BadIdCount {
  unsigned long long count, lowest_route;
};

// A sending block's counts, in shared memory: routes to each expert by physical index, then messages to each
// rank. There is a row for each work warp: first the counts of its own tokens, then those of all tokens
// before its first, which the warp goes on counting from.
struct RouteCounts {
  std::int32_t* memory;
  int stride;

  // A multiple of 16.
  static __host__ __device__ constexpr std::int64_t bytes(const DeviceSignals& signals) {
    return (4 * std::int64_t{kWorkWarps + 2} * 2 * signals.count_words + 15) / 16 * 16;
  }
  // [block] Call __syncthreads() before counting.
  __device__ void clear(const DeviceSignals& signals) const {
    for (unsigned i = threadIdx.x; i < bytes(signals) / 16; i += blockDim.x)
      reinterpret_cast<uint4*>(memory)[i] = make_uint4(0, 0, 0, 0);
  }
  __device__ std::int32_t* of_warp(int warp) const { return memory + warp * stride; }
  __device__ std::int32_t* earlier_blocks() const { return of_warp(kWorkWarps); }
  __device__ std::int32_t* total() const { return of_warp(kWorkWarps + 1); }
};

// Whether this rank plans a route to an expert of `rank`. Without kMayReplicate it plans every route.
template <class Traits>
__device__ __forceinline__ bool plans_route(const LaneView& lane, int rank) {
  if constexpr (Traits::kMayReplicate) return keeps_route(lane.input, rank, lane.rank);
  return true;
}

// The plan of this thread's slot of its tile's token.
struct PlannedSlot {
  std::int32_t id = -1, physical = -1, rank = -1;  // -1: masked or bad
  std::int32_t ordinal = 0;                        // routes of this source to the same expert before this one
  std::int32_t message = 0;                        // number of the token's message to that rank
  std::uint32_t peers = 0;                         // threads with slots of the token at the same rank
  std::uint32_t ranks = 0;                         // narrow: destinations of the token, one bit each
  int rank_index = 0, rank_count = 0;              // wide: destinations below this one; all of the token's
  bool leads = false;  // the first of its peers: it has the message's addresses and publishes its flag
};

// [warp] Plans one token for each tile, in token order. `counts`: the warp's row of RouteCounts, which it
// advances. Where tokens go to every rank, its caller knows their messages (lead_to_every_rank()).
template <class Traits>
__device__ __forceinline__ PlannedSlot plan_slots(const LaneView& lane, const BlockTables& tables,
                                                  const TokenTile& tile, std::int32_t* counts,
                                                  std::int64_t id) {
  const int me = static_cast<int>(threadIdx.x % 32);
  const std::uint32_t lower = (1u << me) - 1, higher = ~lower - (1u << me);
  std::int32_t* const messages = counts + lane.signals.first_messages;
  PlannedSlot slot;
  const bool is_expert = classify_id(id, lane.experts) == IdKind::expert;
  if (is_expert && plans_route<Traits>(lane, tables.rank_of[tables.physical_of[id]])) {
    slot.id = static_cast<std::int32_t>(id);
    slot.physical = tables.physical_of[id];
    slot.rank = tables.rank_of[slot.physical];
    slot.ordinal = counts[slot.physical];
    if constexpr (!Traits::kToEveryRank) slot.message = messages[slot.rank];
  }
  const bool has = slot.physical >= 0;
  const std::uint32_t same = __match_any_sync(~0u, has ? slot.physical : -1 - me);
  if constexpr (Traits::kToEveryRank) {
    slot.ordinal += __popc(static_cast<int>(same & lower));
    __syncwarp();  // as below
    if (has && (same & higher) == 0) counts[slot.physical] = slot.ordinal + 1;
    __syncwarp();
    return slot;
  }
  const std::uint32_t toward = __match_any_sync(~0u, has ? slot.rank : -1 - me);
  slot.peers = toward & tile.mask(tile.index());
  slot.leads = has && (slot.peers & lower) == 0;
  if constexpr (!kWide) slot.ranks = tile.reduce_or(has ? 1u << slot.rank : 0);
  const std::uint32_t all_leaders = __ballot_sync(~0u, slot.leads), leaders = toward & all_leaders;
  if constexpr (kWide) {
    std::uint32_t left = all_leaders & tile.mask(tile.index());
    slot.rank_count = __popc(static_cast<int>(left));
#pragma unroll 1
    while (__any_sync(~0u, left != 0)) {
      const std::int32_t other = __shfl_sync(~0u, slot.rank, max(__ffs(static_cast<int>(left)) - 1, 0));
      slot.rank_index += left != 0 && other < slot.rank;
      left &= left - 1;
    }
  }
  slot.ordinal += __popc(static_cast<int>(same & lower));
  slot.message += __popc(static_cast<int>(leaders & ((1u << tile.index() * tile.size()) - 1)));
  // All threads have read the counts; then the last thread of each expert, and of each rank, advances them.
  __syncwarp();
  if (has && (same & higher) == 0) counts[slot.physical] = slot.ordinal + 1;
  if (slot.leads && (leaders & higher) == 0) messages[slot.rank] = slot.message + 1;
  __syncwarp();
  return slot;
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
