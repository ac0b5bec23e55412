// The only device code that reads ids: how many routes and messages come before a token.
#pragma once

#include "cuda/dispatch.hpp"
#include "layout/plan_layout.hpp"

namespace ferry::cuda {

// Tables and running counts of a block, in its shared memory: routes to every expert and messages to every
// rank of the tokens counted so far.
struct RoutingTables {
  std::int32_t* experts;    // [E], then messages [R]: one run, as letters carry them
  std::int32_t* messages;   // [R]
  std::uint8_t* rank_of;    // [E]
  std::uint16_t* local_of;  // [E]

  static __host__ __device__ constexpr std::int64_t bytes(int experts, int ranks) {
    return (4 * (std::int64_t{experts} + ranks) + 3 * std::int64_t{experts} + 15) / 16 * 16 + 16;
  }

  __device__ static RoutingTables at(std::byte* memory, int experts, int ranks) {
    RoutingTables tables;
    tables.experts = reinterpret_cast<std::int32_t*>(memory);
    tables.messages = tables.experts + experts;
    tables.local_of = reinterpret_cast<std::uint16_t*>(tables.messages + ranks);
    tables.rank_of = reinterpret_cast<std::uint8_t*>(tables.local_of + experts);
    return tables;
  }

  // These counts with the places of others.
  __device__ RoutingTables with(const RoutingTables& places) const {
    return {experts, messages, places.rank_of, places.local_of};
  }

  // By the whole block; a barrier follows.
  __device__ void fill(const LaneView& lane) const {
    for (int i = threadIdx.x; i < lane.experts + lane.ranks; i += blockDim.x) experts[i] = 0;
    for (int e = threadIdx.x; e < lane.experts; e += blockDim.x) {
      const ExpertPlace place = lane.place[e];
      rank_of[e] = static_cast<std::uint8_t>(place.rank);
      local_of[e] = static_cast<std::uint16_t>(place.local);
    }
  }
};

__device__ __forceinline__ std::int64_t id_at(const DispatchArguments& call, std::int64_t route) {
  return call.wide_ids ? static_cast<const std::int64_t*>(call.ids)[route]
                       : static_cast<const std::int32_t*>(call.ids)[route];
}

__device__ __forceinline__ bool is_expert(const LaneView& lane, std::int64_t id) {
  return id >= 0 && id < lane.experts;
}

// Four ids at a time where they lie so; -1 past the token's last.
__device__ __forceinline__ void load_ids(const DispatchArguments& call, std::int64_t token, int first,
                                         std::int64_t (&id)[4]) {
  const int top_k = call.lane.top_k;
  const std::int64_t route = token * top_k + first;
  if (!call.wide_ids && top_k % 4 == 0 && reinterpret_cast<std::uintptr_t>(call.ids) % 16 == 0) {
    const int4 four = *reinterpret_cast<const int4*>(static_cast<const std::int32_t*>(call.ids) + route);
    id[0] = four.x, id[1] = four.y, id[2] = four.z, id[3] = four.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) id[i] = first + i < top_k ? id_at(call, route + i) : -1;
}

// Ids of a call that are no experts: how many, and the lowest route with one.
struct BadIds {
  unsigned long long number, lowest;
};

// Adds tokens [begin, end) to the running counts, and their bad ids to `bad` if given. By whole warps: thread
// `thread` of `threads` that work together; a barrier among them must follow before the counts are read.
__device__ inline void count_tokens(const DispatchArguments& call, const RoutingTables& tables,
                                    std::int64_t begin, std::int64_t end, int thread, int threads,
                                    BadIds* bad = nullptr) {
  const LaneView& lane = call.lane;
  const int mine = thread % 32;
  int messages = 0;  // to the rank whose number this thread has in its warp
  for (std::int64_t base = begin + thread - mine; base < end; base += threads) {
    const std::int64_t token = base + mine;
    std::uint32_t ranks = 0;
    for (int slot = 0; slot < lane.top_k && token < end; slot += 4) {
      std::int64_t id[4];
      load_ids(call, token, slot, id);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (is_expert(lane, id[i])) {
          atomicAdd(&tables.experts[id[i]], 1);
          ranks |= 1u << tables.rank_of[id[i]];
        } else if (bad != nullptr && id[i] != -1) {
          atomicAdd(&bad->number, 1ull);
          atomicMin(&bad->lowest, static_cast<unsigned long long>(token * lane.top_k + slot + i));
        }
      }
    }
    // Everybody's token may go to the same rank: counted by votes.
    for (int rank = 0; rank < lane.ranks; ++rank) {
      const int votes = __popc(static_cast<int>(__ballot_sync(~0u, ranks >> rank & 1)));
      if (rank == mine) messages += votes;
    }
  }
  if (messages > 0) atomicAdd(&tables.messages[mine], messages);
}

// A token this block sends, as its warp has planned it; in shared memory.
struct PlannedToken {
  std::int64_t token;               // -1: none
  std::uint32_t ranks;              // destinations, one bit each
  std::int32_t id[kMaxTopK];        // -1: masked or bad
  std::int32_t message[kMaxRanks];  // number of the message to each destination
};

// First step, by one warp: the token's ids. A barrier among the block's planning warps must follow.
__device__ inline void plan_ids(const DispatchArguments& call, const RoutingTables& tables,
                                std::int64_t token, PlannedToken* planned) {
  const LaneView& lane = call.lane;
  const int slot = threadIdx.x % 32;
  std::int64_t id = slot < lane.top_k ? id_at(call, token * lane.top_k + slot) : -1;
  if (!is_expert(lane, id)) id = -1;
  const std::uint32_t bit = id >= 0 ? 1u << tables.rank_of[id] : 0;
  const std::uint32_t ranks = __reduce_or_sync(~0u, bit);
  planned->id[slot] = static_cast<std::int32_t>(id);
  if (slot == 0) {
    planned->token = token;
    planned->ranks = ranks;
  }
}

// Second step: places within the source. `planned` are this block's tokens of the round in order, `mine` this
// warp's; the running counts hold everything before the first of them. Writes the plan's entries of the
// token; a route's entry in route_row is its ordinal (rank_major: its message's number) until the rows are
// known. Returns the slot's ordinal.
__device__ inline std::int32_t plan_places(const LaneView& lane, const RoutingTables& tables,
                                           const PlanView& plan, PlannedToken* planned, int mine) {
  const int slot = threadIdx.x % 32;
  PlannedToken& own = planned[mine];
  const std::int32_t id = own.id[slot];
  const std::uint32_t ranks = own.ranks;

  std::int32_t ordinal = 0;
  if (id >= 0) ordinal = tables.experts[id];
  for (int earlier = 0; earlier < mine; ++earlier) {
    for (int k = 0; k < lane.top_k; ++k) ordinal += id >= 0 && planned[earlier].id[k] == id;
  }
  const std::uint32_t same = __match_any_sync(~0u, id >= 0 ? id : -1 - slot);
  ordinal += __popc(static_cast<int>(same & ((1u << slot) - 1)));

  std::int32_t message = 0;
  if (slot < lane.ranks) {
    message = tables.messages[slot];
    for (int earlier = 0; earlier < mine; ++earlier) message += planned[earlier].ranks >> slot & 1;
    own.message[slot] = message;
  }
  __syncwarp();

  const std::int64_t token = own.token, route = token * lane.top_k + slot;
  const int destination = id >= 0 ? tables.rank_of[id] : -1;
  if (slot < lane.top_k) {
    plan.route_expert[route] = id;
    plan.route_rank[route] = destination;
    const bool by_message = lane.layout == Layout::rank_major;
    plan.route_row[route] = id < 0 ? -1 : by_message ? own.message[destination] : ordinal;
  }
  if (slot < lane.ranks && (ranks >> slot & 1) != 0) {
    const int position = __popc(static_cast<int>(ranks & ((1u << slot) - 1)));
    plan.token_ranks[token * lane.most_ranks + position] = slot;
    plan.sent_tokens[std::int64_t{slot} * lane.max_tokens + message] = static_cast<std::int32_t>(token);
  }
  const int reached = __popc(static_cast<int>(ranks));
  if (slot >= reached && slot < lane.most_ranks) plan.token_ranks[token * lane.most_ranks + slot] = -1;
  return ordinal;
}

}  // namespace ferry::cuda
