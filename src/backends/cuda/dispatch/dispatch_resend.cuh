// Sending by a plan that exists already.
#pragma once

#include "backends/cuda/dispatch/dispatch_send.cuh"

namespace ferry::cuda {

// What a plan says of this thread's slot of its team's token; -1 past the last token.
struct KeptRoute {
  std::int32_t rank = -1, expert = -1, row = -1;
  float weight = 0;

  __device__ __forceinline__ static KeptRoute of(const DispatchArguments& call, const Team& team,
                                                 std::int64_t first, std::int64_t end) {
    const std::int64_t token = first + team.mine(), route = token * call.lane.top_k + team.slot();
    if (token >= end || team.slot() >= call.lane.top_k) return {};
    return {call.plan.route_rank[route], call.plan.route_expert[route], call.plan.route_row[route],
            call.weights != nullptr ? call.weights[route] : 0.0f};
  }
};

// Tokens from a plan, one warp's, in order. What does not fit together in a damaged plan is counted; where it
// is not left out, rows go where others belong.
struct PlanReader {
  const SendState& state;
  KeptRoute ahead;           // of the next tokens
  std::int32_t messages;     // to this thread's rank, of all tokens
  std::int32_t sent_before;  // of those, before the next tokens
  // About this thread's slot of a token now, for keep().
  bool bad = false;                          // it cannot be right
  std::int32_t rank = -1;                    // of the message it leads, if any
  std::int32_t message = 0, sent_token = 0;  // its number, and whose the plan says it is

  __device__ __forceinline__ PlanReader(const SendState& of, const Team& team, std::int32_t begin,
                                        std::int32_t end)
      : state(of), ahead(KeptRoute::of(of.call, team, begin, end)) {
    const LaneView& lane = state.call.lane;
    const int me = static_cast<int>(threadIdx.x % 32);
    messages = me < lane.ranks ? static_cast<int>(messages_between(lane, state.call.plan, lane.rank, me)) : 0;
    sent_before = count_before(begin);
  }

  // Of tokens from `now` on, one for each team, before `end`.
  __device__ __forceinline__ SentSlot next(const Team& team, std::int32_t now, std::int32_t end) {
    const LaneView& lane = state.call.lane;
    const int me = static_cast<int>(threadIdx.x % 32);
    const KeptRoute route = ahead;
    ahead = KeptRoute::of(state.call, team, now + team.count(), end);
    SentSlot slot;
    if (route.rank >= 0 && route.rank < lane.ranks) slot.rank = route.rank;
    const std::uint32_t toward = __match_any_sync(~0u, slot.rank >= 0 ? slot.rank : -1 - me);
    slot.peers = toward & team.threads(team.mine());
    slot.leads = slot.rank >= 0 && (slot.peers & ((1u << me) - 1)) == 0;
    const std::uint32_t leaders = __ballot_sync(~0u, slot.leads), here = leaders & toward;
    const int to = max(slot.rank, 0);
    slot.message = __shfl_sync(~0u, sent_before, to) +
                   __popc(static_cast<int>(here & ((1u << team.mine() * team.size()) - 1)));
    const bool fits = slot.message < __shfl_sync(~0u, messages, to);
#pragma unroll 1
    for (std::uint32_t left = leaders; left != 0;) {
      const int leader = __ffs(static_cast<int>(left)) - 1;
      const std::uint32_t same = __shfl_sync(~0u, here, leader);
      if (__shfl_sync(~0u, slot.rank, leader) == me) sent_before += __popc(static_cast<int>(same));
      left &= ~same;
    }
    bad = (route.rank != -1 && slot.rank < 0) || (slot.leads && !fits);
    slot.leads = slot.leads && fits;
    rank = slot.leads ? slot.rank : -1;
    message = slot.message;
    // Looked at when the rows are on their way.
    if (slot.leads) sent_token = state.call.plan.sent_tokens[std::int64_t{to} * lane.max_tokens + message];
    if (slot.rank < 0) return slot;
    slot.weight = route.weight;
    slot.local = local_at(slot.rank, route.expert);
    slot.row = row_at(slot.rank, route.row, (std::int64_t{now} + team.mine()) * lane.top_k + team.slot());
    return slot;
  }
  // By threads whose team has a token.
  __device__ __forceinline__ void keep(const Team& team, std::int64_t token) const {
    const LaneView& lane = state.call.lane;
    if (bad) record_bad_source(lane, token * lane.top_k + team.slot());
    if (rank >= 0 && sent_token != token)
      record_bad_source(lane, std::int64_t{rank} * lane.max_tokens + message);
  }

 private:
  // Messages to this thread's rank of tokens before `begin`. The warp's threads share the ranks, and look at
  // as many of a rank's tokens at once as it has threads; their order is ascending.
  __device__ __forceinline__ std::int32_t count_before(std::int32_t begin) const {
    const LaneView& lane = state.call.lane;
    const int me = static_cast<int>(threadIdx.x % 32);
    const int shift = 5 - (32 - __clz(lane.ranks - 1)), each = 1 << shift;  // threads of a rank
    const int of = me >> shift, mine = me & (each - 1);                     // of: the rank
    const std::uint32_t group = (~0u >> (32 - each)) << (of << shift);
    const std::int32_t* tokens = state.call.plan.sent_tokens + std::int64_t{of} * lane.max_tokens;
    int low = 0, count = __shfl_sync(~0u, messages, of);
    while (__any_sync(~0u, count > 0)) {
      const int at = low + ((2 * mine + 1) * count >> (shift + 1));
      const std::uint32_t before = __ballot_sync(~0u, count > 0 && tokens[at] < begin) & group;
      // Of a damaged plan they need not be the first ones.
      const int last = before != 0 ? 31 - __clz(static_cast<int>(before)) : me,
                after = before == 0 ? of << shift : min(last + 1, 31);
      const int at_last = __shfl_sync(~0u, at, last), at_after = __shfl_sync(~0u, at, after);
      const int end = before == 0 || last + 1 < (of + 1) << shift ? at_after : low + count;
      if (before != 0) low = at_last + 1;
      count = end - low;
    }
    return __shfl_sync(~0u, low, min(me << shift, 31));
  }

  // A planned expert's number at its rank, or kElsewhere: none that the rank has.
  __device__ std::int32_t local_at(int rank, std::int32_t expert) const {
    const BlockTables& tables = state.tables;
    if (!is_expert(state.call.lane, expert)) return SlotMetadata::kElsewhere;
    const int position = tables.position_of[expert];
    return tables.rank_of[position] == rank ? position - tables.first_expert[rank] : SlotMetadata::kElsewhere;
  }

  // A planned row at another rank, or -1: dropped, or none that the rank has.
  __device__ std::int32_t row_at(int rank, std::int32_t row, std::int64_t route) const {
    const LaneView& lane = state.call.lane;
    const BlockTables& tables = state.tables;
    if (row == -1 || (state.direct_write_peers >> rank & 1) == 0) return -1;
    const std::int64_t groups =
        lane.layout == Layout::expert_padded ? tables.first_expert[rank + 1] - tables.first_expert[rank] : 1;
    return usable(lane, row, groups * tables.capacity[rank], route) ? row : -1;
  }
};

}  // namespace ferry::cuda
