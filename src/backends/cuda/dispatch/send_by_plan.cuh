// Plans the tokens of a dispatch whose routes come from an earlier plan.
#pragma once

#include "backends/cuda/dispatch/dispatch_send.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// The plan's entries of this thread's slot of its tile's token; all -1 from token `end` on.
struct PlannedRoute {
  std::int32_t rank = -1, expert = -1, row = -1;
  float weight = 0;

  __device__ __forceinline__ static PlannedRoute of(const DispatchArguments& call, const TokenTile& tile,
                                                    std::int64_t first, std::int64_t end) {
    const std::int64_t token = first + tile.index(), route = token * call.lane.top_k + tile.slot();
    if (token >= end || tile.slot() >= call.lane.top_k) return {};
    return {call.plan.route_rank[route], call.plan.route_expert[route], call.plan.route_row[route],
            call.weights != nullptr ? call.weights[route] : 0.0f};
  }
};

// Reads a warp's tokens from a plan, in order. Entries of a damaged plan that contradict each other are
// recorded. A contradiction that is not caught may put rows at the wrong positions, never outside the arrays.
template <class Traits>
struct PlanReader {
  const SendContext& context;
  PlannedRoute ahead;  // loaded early, for the next tokens
  // Wide: [R] in the warp's row of RouteCounts, of each rank. The number of the first message that the next
  // tokens send to it.
  std::int32_t* next_messages;
  std::int32_t messages;      // narrow: to this thread's rank, of all tokens
  std::int32_t next_message;  // narrow: the number, for this thread's rank
  // For finish(), about this thread's slot of the current token.
  bool bad = false;                          // its entries cannot be right
  std::int32_t rank = -1;                    // destination of the message it leads, or -1
  std::int32_t message = 0, sent_token = 0;  // that message's number, and its token in the plan's sent_tokens

  // `counts`: the warp's row of RouteCounts.
  __device__ __forceinline__ PlanReader(const SendContext& of, const TokenTile& tile, std::int32_t begin,
                                        std::int32_t end, std::int32_t* counts)
      : context(of), ahead(PlannedRoute::of(of.call, tile, begin, end)), next_messages(counts) {
    const LaneView& lane = context.call.lane;
    const int me = static_cast<int>(threadIdx.x % 32);
    if constexpr (kWide) {
      for (int rank = me; rank < lane.ranks; rank += 32) next_messages[rank] = messages_before(rank, begin);
      __syncwarp();
      return;
    }
    messages =
        me < lane.ranks ? static_cast<int>(messages_between(lane, context.call.plan, lane.rank, me)) : 0;
    next_message = Traits::kToEveryRank ? 0 : count_messages_before(begin);
  }

  __device__ __forceinline__ OutgoingSlot next(const TokenTile& tile, std::int32_t first, std::int32_t end) {
    const LaneView& lane = context.call.lane;
    const int me = static_cast<int>(threadIdx.x % 32);
    const PlannedRoute route = ahead;
    ahead = PlannedRoute::of(context.call, tile, first + tile.per_warp(), end);
    OutgoingSlot slot;
    if (route.rank >= 0 && route.rank < lane.ranks) slot.rank = route.rank;
    if constexpr (Traits::kToEveryRank) {
      lead_to_every_rank(lane, tile, first + tile.index(), end, &slot);
      const bool sent = slot.message < __shfl_sync(~0u, messages, tile.slot());
      check_message(tile.slot(), route, sent, &slot);
      return with_route(tile, first, route, slot);
    }
    const std::uint32_t toward = __match_any_sync(~0u, slot.rank >= 0 ? slot.rank : -1 - me);
    slot.peers = toward & tile.mask(tile.index());
    slot.leads = slot.rank >= 0 && (slot.peers & ((1u << me) - 1)) == 0;
    const std::uint32_t leaders = __ballot_sync(~0u, slot.leads), leaders_there = leaders & toward;
    const int to = max(slot.rank, 0);
    const std::uint32_t earlier_tiles = (1u << tile.index() * tile.size()) - 1;
    bool fits;
    if constexpr (kWide) {
      slot.message = next_messages[to] + __popc(static_cast<int>(leaders_there & earlier_tiles));
      fits = slot.message < messages_between(lane, context.call.plan, lane.rank, to);
      // All threads have read the numbers; then the last leader of each rank advances its own.
      __syncwarp();
      if (slot.leads && leaders_there >> me == 1) next_messages[to] = slot.message + 1;
      __syncwarp();
    } else {
      slot.message =
          __shfl_sync(~0u, next_message, to) + __popc(static_cast<int>(leaders_there & earlier_tiles));
      fits = slot.message < __shfl_sync(~0u, messages, to);
#pragma unroll 1
      for (std::uint32_t left = leaders; left != 0;) {
        const int leader = __ffs(static_cast<int>(left)) - 1;
        const std::uint32_t same = __shfl_sync(~0u, leaders_there, leader);
        if (__shfl_sync(~0u, slot.rank, leader) == me) next_message += __popc(static_cast<int>(same));
        left &= ~same;
      }
    }
    check_message(slot.rank, route, fits, &slot);
    return with_route(tile, first, route, slot);
  }
  // Records the token's contradictions.
  __device__ __forceinline__ void finish(const TokenTile& tile, std::int64_t token) const {
    const LaneView& lane = context.call.lane;
    if (bad) record_bad_source(lane, token * lane.top_k + tile.slot());
    if (rank >= 0 && sent_token != token)
      record_bad_source(lane, std::int64_t{rank} * lane.max_tokens + message);
  }

 private:
  // [thread] The messages to `rank` of tokens before `begin`: a search in the plan's sent_tokens, which
  // ascend.
  __device__ std::int32_t messages_before(int rank, std::int32_t begin) const {
    const LaneView& lane = context.call.lane;
    const std::int32_t* tokens = context.call.plan.sent_tokens + std::int64_t{rank} * lane.max_tokens;
    std::int32_t low = 0,
                 high = static_cast<std::int32_t>(messages_between(lane, context.call.plan, lane.rank, rank));
    while (low < high) {
      const std::int32_t middle = (low + high) / 2;
      if (tokens[middle] < begin) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // Cancels the message that this thread leads, to rank `led`, unless the plan has it (`fits`).
  __device__ __forceinline__ void check_message(int led, const PlannedRoute& route, bool fits,
                                                OutgoingSlot* slot) {
    bad = (route.rank != -1 && slot->rank < 0) || (slot->leads && !fits);
    slot->leads = slot->leads && fits;
    rank = slot->leads ? led : -1;
    message = slot->message;
    // Compared in finish(), when the rows are in flight.
    const std::int64_t to = max(led, 0);
    if (slot->leads) sent_token = context.call.plan.sent_tokens[to * context.call.lane.max_tokens + message];
  }

  // `slot`, completed by its entries in the plan.
  __device__ __forceinline__ OutgoingSlot with_route(const TokenTile& tile, std::int32_t first,
                                                     const PlannedRoute& route, OutgoingSlot slot) const {
    if (slot.rank < 0) return slot;
    slot.weight = route.weight;
    slot.group = group_of_expert(slot.rank, route.expert);
    slot.direct_row = checked_row(
        slot.rank, route.row, (std::int64_t{first} + tile.index()) * context.call.lane.top_k + tile.slot());
    return slot;
  }

  // [warp] The messages to this thread's rank of tokens before `begin`: a search in the plan's sent_tokens,
  // which ascend. The warp's threads are divided among the ranks; the threads of a rank probe as many of its
  // tokens at once.
  __device__ __forceinline__ std::int32_t count_messages_before(std::int32_t begin) const {
    const LaneView& lane = context.call.lane;
    const int me = static_cast<int>(threadIdx.x % 32);
    const int shift = 5 - (32 - __clz(lane.ranks - 1)), each = 1 << shift;  // threads of a rank
    const int of = me >> shift, mine = me & (each - 1);  // of: the rank this thread searches for
    const std::uint32_t threads = (~0u >> (32 - each)) << (of << shift);
    const std::int32_t* tokens = context.call.plan.sent_tokens + std::int64_t{of} * lane.max_tokens;
    int low = 0, count = __shfl_sync(~0u, messages, of);
    while (__any_sync(~0u, count > 0)) {
      const int at = low + ((2 * mine + 1) * count >> (shift + 1));
      const std::uint32_t before = __ballot_sync(~0u, count > 0 && tokens[at] < begin) & threads;
      // In a damaged plan the threads in `before` need not be the first ones.
      const int last = before != 0 ? 31 - __clz(static_cast<int>(before)) : me,
                after = before == 0 ? of << shift : min(last + 1, 31);
      const int at_last = __shfl_sync(~0u, at, last), at_after = __shfl_sync(~0u, at, after);
      const int end = before == 0 || last + 1 < (of + 1) << shift ? at_after : low + count;
      if (before != 0) low = at_last + 1;
      count = end - low;
    }
    return __shfl_sync(~0u, low, min(me << shift, 31));
  }

  // The group, at `rank`, of a planned expert; kElsewhere if the rank does not have it.
  __device__ std::int32_t group_of_expert(int rank, std::int32_t expert) const {
    const BlockTables& tables = context.tables;
    if (classify_id(expert, context.call.lane.experts) != IdKind::expert) return SlotMetadata::kElsewhere;
    const int physical = tables.physical_of[expert];
    return tables.rank_of[physical] == rank ? group_of(context.call.lane, tables, physical, rank)
                                            : SlotMetadata::kElsewhere;
  }

  // A planned row at another rank, if this rank writes it directly; -1 if not, if dropped, or if the rank has
  // no such row.
  __device__ std::int32_t checked_row(int rank, std::int32_t row, std::int64_t route) const {
    const LaneView& lane = context.call.lane;
    const BlockTables& tables = context.tables;
    if (row == -1 || kWide || (context.direct_write_peers >> rank & 1) == 0) return -1;
    const std::int64_t groups = lane.layout == Layout::expert_padded
                                    ? group_of(lane, tables, tables.first_physical[rank + 1], rank)
                                    : 1;
    return valid_entry(lane, row, groups * tables.capacity[rank], route) ? row : -1;
  }
};

}  // namespace ferry::cuda::inline FERRY_WIDTH
