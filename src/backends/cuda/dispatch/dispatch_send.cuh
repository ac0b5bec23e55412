// The sending role of dispatch: tokens go once to every rank that has one of their experts.
//
// A warp plans as many tokens at once as it has teams, a thread for each slot, or looks up what a plan says
// of them (dispatch_resend.cuh); the first slot of a token at a rank leads the message to it. Then it loads a
// piece of a token's row and stores it at every destination: where the row will stay, if the destination lets
// this rank place rows and this rank waits for the counts of all first; else in the destination's staging.
// What the receiver must know of the token, and all that is not moved as it is, goes to staging always.
#pragma once

#include "backends/cuda/dispatch/send_row.cuh"

namespace ferry::cuda {

// Messages to other ranks and their bytes, for Exchange::wire; notes that there is none are not counted.
struct Sent {
  unsigned long long messages = 0;

  // By a whole warp: one for each thread that `sends` one.
  __device__ void add(bool sends) { messages += static_cast<unsigned>(__popc(__ballot_sync(~0u, sends))); }
  // By the thread that counted.
  __device__ void publish(const DispatchArguments& call) const {
    if (messages == 0) return;
    add_wire(&call.lane.state->wire.dispatch_messages, messages);
    const std::int64_t bytes = device_message_bytes(call.message, call.lane.top_k);
    add_wire(&call.lane.state->wire.dispatch_bytes, messages * static_cast<unsigned long long>(bytes));
  }
};

// What warps that send go by.
struct SendState {
  const DispatchArguments& call;
  BlockTables tables;
  RowOffsets places;
  bool waits;                        // for places; otherwise all rows are staged
  std::uint32_t direct_write_peers;  // ranks that let this one place rows
  FlagPublisher<kWorkWarps>* publisher;
  std::uint64_t number;

  __device__ int parity() const { return static_cast<int>(number & 1); }

  // Whether rows to this rank move at all: receivers read their own rank's where the caller has them.
  __device__ __forceinline__ bool travels(int rank) const {
    return rank != call.lane.rank || call.own_staged;
  }

  // Of the message that this thread leads, if it does. `placed`: where its row will stay at that rank, or -1.
  __device__ __forceinline__ Destination destination(bool leads, int rank, std::int32_t message,
                                                     std::int32_t placed) const {
    if (!leads) return {};
    const LaneView& lane = call.lane;
    Destination to = Destination::of(lane, rank, parity(), message, call.message.bytes);
    if (!travels(rank)) return to;
    if ((direct_write_peers >> rank & 1) == 0) {
      to.row = to.message;
    } else if (placed >= 0) {
      to.row = lane.arrived_row(rank, placed, static_cast<std::int32_t>(call.parts.part[0].row_bytes));
    }
    return to;
  }
  // This thread's flag: by the announcing warp, unless this warp has nothing else to do than wait for its
  // stores, its `last`.
  __device__ __forceinline__ void announce(std::uint64_t* flag, bool last) const {
    if (!last) return publisher->ask(flag != nullptr, flag, 1);
    // All threads' stores before the fence, by the barrier.
    __syncwarp();
    inject_fault(call.lane, Point::flag);
    if (flag != nullptr) publish_now(flag, 1, number);
  }
};

// What becomes of this thread's slot of its team's token.
struct SentSlot {
  std::int32_t rank = -1;                         // -1: it goes nowhere
  std::int32_t local = SlotMetadata::kElsewhere;  // its expert's number there
  std::int32_t ordinal = 0;                       // routes of this source to the same expert before it
  float weight = 0;
  std::int32_t message = 0;  // number of the token's message to that rank
  std::uint32_t peers = 0;   // threads with slots of the token at the same rank
  bool leads = false;        // coordinates for the message
  std::int32_t row = -1;     // where its row will stay, or -1
};

// Tokens from ids: planned here, for others and for the plan. One warp's, in order.
struct IdPlanner {
  const SendState& state;
  std::int32_t* counts;  // of the warp
  SlotRoute ahead;       // of the next tokens
  PlannedSlot slot{};    // of the tokens now
  std::int32_t row = -1;

  // Of tokens from `now` on, one for each team, before `end`.
  __device__ __forceinline__ SentSlot next(const Team& team, std::int32_t now, std::int32_t end) {
    const LaneView& lane = state.call.lane;
    const SlotRoute route = ahead;
    slot = plan_tokens(lane, state.tables, team, counts, route.id.value(state.call));
    // The next ones', while these ones' rows are on their way.
    ahead = SlotRoute::of(state.call, team, now + team.count(), end);
    row = lane.layout == Layout::rank_major ? slot.message : slot.ordinal;
    if (slot.rank < 0) row = -1;
    if (state.waits) row = row_of_route(lane, state.tables, state.places, slot.position, slot.rank, row);
    SentSlot sent{.rank = slot.rank,
                  .ordinal = slot.ordinal,
                  .weight = route.weight,
                  .message = slot.message,
                  .peers = slot.peers,
                  .leads = slot.leads,
                  .row = row};
    if (slot.rank >= 0) sent.local = slot.position - state.tables.first_expert[slot.rank];
    return sent;
  }

  // The plan's entries of a token.
  __device__ __forceinline__ void keep(const Team& team, std::int64_t token) const {
    const LaneView& lane = state.call.lane;
    const PlanView& plan = state.call.plan;
    const int at = team.slot();
    if (at < lane.top_k) {
      const std::int64_t route = token * lane.top_k + at;
      plan.route_expert[route] = slot.id;
      plan.route_rank[route] = slot.rank;
      plan.route_row[route] = row;
    }
    if (slot.leads) {
      const int position = __popc(static_cast<int>(slot.ranks & ((1u << slot.rank) - 1)));
      plan.token_ranks[token * lane.most_ranks + position] = slot.rank;
      plan.sent_tokens[std::int64_t{slot.rank} * lane.max_tokens + slot.message] =
          static_cast<std::int32_t>(token);
    }
    if (at >= __popc(static_cast<int>(slot.ranks)) && at < lane.most_ranks)
      plan.token_ranks[token * lane.most_ranks + at] = -1;
  }
};

// Tokens from ids, where nothing but their destinations must be known. One warp's, in order.
struct RowPlanner {
  const SendState& state;
  SlotRoute ahead;  // of the next tokens

  __device__ __forceinline__ SentSlot next(const Team& team, std::int32_t now, std::int32_t end) {
    const int me = static_cast<int>(threadIdx.x % 32);
    const std::int64_t id = ahead.id.value(state.call);
    ahead = SlotRoute::of(state.call, team, now + team.count(), end);
    SentSlot slot{.message = now + team.mine()};
    if (is_expert(state.call.lane, id)) slot.rank = state.tables.rank_of[state.tables.position_of[id]];
    slot.peers = __match_any_sync(~0u, slot.rank >= 0 ? slot.rank : -1 - me) & team.threads(team.mine());
    slot.leads = slot.rank >= 0 && (slot.peers & ((1u << me) - 1)) == 0;
    return slot;
  }
  __device__ __forceinline__ void keep(const Team&, std::int64_t) const {}
};

// By a whole warp: what the receivers of each team's token must know of this thread's slot, told to each.
// `token`: the team's. kByToken: messages lie by token, and notes have the message's number.
template <bool kByToken>
__device__ __forceinline__ void send_notes(const SendState& state, const Team& team, const Destination& to,
                                           std::int32_t token, const SentSlot& slot) {
  std::uint32_t left = __ballot_sync(~0u, slot.leads) & team.threads(team.mine());
#pragma unroll 1
  while (__any_sync(~0u, left != 0)) {
    const int leader = max(__ffs(static_cast<int>(left)) - 1, 0);
    const int receiver = __shfl_sync(~0u, slot.rank, leader),
              message = __shfl_sync(~0u, slot.message, leader);
    auto* notes = pointer_of(to.notes, leader);
    const SlotMetadata note{.token = kByToken ? message : token,
                            .local = slot.rank == receiver ? slot.local : SlotMetadata::kElsewhere,
                            .first_of_lower = slot.leads && slot.rank < receiver,
                            .ordinal = slot.ordinal,
                            .weight = slot.weight};
    if (left != 0 && team.slot() < state.call.lane.top_k)
      store_packet_relaxed_sys(notes + team.slot(), note.unit(state.number));
    left &= left - 1;
  }
}

// One warp that sends. Its messages but the last are announced by the block's announcing warp.
template <class Traits>
struct Sender {
  const SendState& state;
  const DispatchArguments& call;
  Team team;
  Sent sent{};

  __device__ explicit Sender(const SendState& of)
      : state(of), call(of.call), team(Team::of(of.call.lane.top_k)) {}

  // The units of worker `worker`, whose tokens `planner` goes through. `stream`: of their rows, some of which
  // have been asked for.
  template <class Planner>
  __device__ __forceinline__ void send_units(const SendPartition& share, int worker, Planner& planner,
                                             RowStream<TokenParts> stream) {
    const std::int32_t begin = share.unit_begin(worker), end = share.token_end(worker);
    // Warps that share a row have one unit, if any.
    const Quarters quarters = Quarters::of(begin & ((1 << share.splits) - 1), share.splits);
    const bool streams = goes_by_stream<Traits>(call, share.splits);
#pragma unroll 1
    for (std::int32_t now = begin >> share.splits; now < end; now += team.count()) {
      const std::int32_t token = now + team.mine();
      const SentSlot slot = planner.next(team, now, end);
      // The first of the token's rows at a rank; its receiver copies the others from it.
      const std::uint32_t kept = __ballot_sync(~0u, slot.row >= 0) & slot.peers;
      const std::int32_t placed = __shfl_sync(~0u, slot.row, max(__ffs(static_cast<int>(kept)) - 1, 0));
      const Destination to = state.destination(slot.leads, slot.rank, slot.message, kept != 0 ? placed : -1);
      if (quarters.first == 0) {
        inject_fault(call.lane, Point::notes);
        if constexpr (!Traits::kByToken) send_notes<false>(state, team, to, token, slot);
        sent.add(slot.leads && slot.rank != call.lane.rank);
      }
      const std::uint32_t travel = __ballot_sync(~0u, to.row != nullptr);
      const int tokens = min(team.count(), end - now);
#pragma unroll 1
      for (int t = 0; t < tokens; ++t) {
        inject_fault(call.lane, Point::row);
        send_row<Traits>(call, now + t, to, travel & team.threads(t), quarters, streams, stream);
        std::uint64_t* flag = team.mine() == t && slot.leads ? to.flags + quarters.first : nullptr;
        state.announce(flag, now + t + 1 == end);
      }
      // Nobody waits for the plan.
      if (quarters.first == 0 && token < end) planner.keep(team, token);
    }
    state.publisher->close();
    if (threadIdx.x % 32 == 0) sent.publish(call);
  }
};

// By one warp: notes of tokens [begin, end), whose rows other blocks send, to all ranks, and the plan's
// entries of them with ordinals in place of rows. `counts`: of the warp.
__device__ __forceinline__ void tell_tokens(const SendState& state, std::int32_t* counts, std::int32_t begin,
                                            std::int32_t end) {
  const LaneView& lane = state.call.lane;
  const Team team = Team::of(lane.top_k);
  const int parity = state.parity();
  IdPlanner planner{state, counts, SlotRoute::of(state.call, team, begin, end)};
#pragma unroll 1
  for (std::int32_t now = begin; now < end; now += team.count()) {
    const std::int32_t token = now + team.mine();
    const SentSlot slot = planner.next(team, now, end);
    Destination to;
    if (slot.leads) to.notes = lane.slot_notes(slot.rank, parity, lane.rank, token);
    inject_fault(lane, Point::notes);
    send_notes<true>(state, team, to, token, slot);
    if (token >= end) continue;
    const LLPacket none = SlotMetadata{.token = SlotMetadata::kNoMessage}.unit(state.number);
    for (int rank = 0; rank < lane.ranks; ++rank) {
      if ((planner.slot.ranks >> rank & 1) != 0 || team.slot() >= lane.top_k) continue;
      store_packet_relaxed_sys(lane.slot_notes(rank, parity, lane.rank, token) + team.slot(), none);
    }
    planner.keep(team, token);
  }
}

// By one warp, once places are known: rows of the routes whose tokens, [begin, end), were sent before.
__device__ inline void finish_routes(const LaneView& lane, const BlockTables& tables,
                                     const RowOffsets& places, const PlanView& plan, std::int64_t begin,
                                     std::int64_t end) {
  const Team team = Team::of(lane.top_k);
  for (std::int64_t token = begin + team.mine(); token < end; token += team.count()) {
    if (team.slot() >= lane.top_k) continue;
    const std::int64_t route = token * lane.top_k + team.slot();
    const std::int32_t expert = plan.route_expert[route];
    if (expert < 0) continue;
    const int position = tables.position_of[expert];
    plan.route_row[route] =
        row_of_route(lane, tables, places, position, tables.rank_of[position], plan.route_row[route]);
  }
}

}  // namespace ferry::cuda
