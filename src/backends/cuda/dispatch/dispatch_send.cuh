// The sending role of dispatch: each token goes once to every rank that has one of its experts.
//
// A warp plans as many tokens at once as it has tiles, a thread for each slot, or reads their plan
// (send_by_plan.cuh). The first slot of a token at a rank leads the message to it. The warp then loads a
// piece of a token's row and stores it at all destinations: at its final position, if the destination accepts
// direct writes and this rank has waited for the counts of all ranks; otherwise in the destination's staging.
// The parts beside the first always go to staging; slot metadata has memory of its own beside it.
#pragma once

#include "backends/cuda/dispatch/row_offsets.cuh"
#include "backends/cuda/dispatch/send_row.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// Counts messages to other ranks and their bytes, for Exchange::wire_counts(). A metadata entry that says
// that there is no message is not counted.
struct WireCounter {
  unsigned long long messages = 0;

  // [warp] Adds one for each thread that `sends` a message.
  __device__ void add(bool sends) { messages += static_cast<unsigned>(__popc(__ballot_sync(~0u, sends))); }
  // [thread]
  __device__ void publish(const DispatchArguments& call) const {
    if (messages == 0) return;
    add_wire(&call.lane.state->wire.dispatch_messages, messages);
    const std::int64_t bytes = device_message_bytes(call.message, call.lane.top_k);
    add_wire(&call.lane.state->wire.dispatch_bytes, messages * static_cast<unsigned long long>(bytes));
  }
};

// A sending warp's view of its block and call.
struct SendContext {
  const DispatchArguments& call;
  BlockTables tables;
  RowOffsets offsets;
  bool has_row_offsets;              // the block has waited for them; otherwise every row is staged
  std::uint32_t direct_write_peers;  // ranks to which this one writes rows directly, one bit each
  FlagPublisher<kWorkWarps>* publisher;
  std::uint64_t number;  // of the call

  __device__ int parity() const { return static_cast<int>(number & 1); }

  // Whether rows to this rank are sent. Receivers read rows from their own rank in the caller's memory.
  __device__ __forceinline__ bool travels(int rank) const {
    return rank != call.lane.rank || call.own_staged;
  }

  // The addresses of the message that this thread leads. `direct_row`: its row's position at that rank, or
  // -1.
  __device__ __forceinline__ Destination destination(bool leads, int rank, std::int32_t message,
                                                     std::int32_t direct_row) const {
    if (!leads) return {};
    const LaneView& lane = call.lane;
    Destination to = Destination::of(lane, rank, parity(), message, call.message.bytes);
    if (!travels(rank)) return to;
    if (kWide || (direct_write_peers >> rank & 1) == 0) {
      to.row = to.message;
    } else if (direct_row >= 0) {
      to.row = memory::received_row(lane, rank, direct_row,
                                    static_cast<std::int32_t>(call.parts.part[0].row_bytes));
    }
    return to;
  }
  // [warp] Publishes each thread's flag, if it has one, after the warp's stores. The publisher warp does it,
  // so that this warp goes on with its next row; after its last row this warp waits for its stores itself.
  __device__ __forceinline__ void publish_flag(Flag* flag, bool last) const {
    if (!last) return publisher->enqueue(flag != nullptr, flag, 1);
    // The barrier orders all threads' stores before the fence in publish_now().
    __syncwarp();
    inject_fault(call.lane, KernelPoint::flag);
    if (flag != nullptr) publish_now(flag, 1, number);
  }
};

// The destination of this thread's slot of its tile's token.
struct OutgoingSlot {
  std::int32_t rank = -1;                         // -1: nowhere
  std::int32_t group = SlotMetadata::kElsewhere;  // of its expert there
  std::int32_t ordinal = 0;                       // routes of this source to the same expert before this one
  float weight = 0;
  std::int32_t message = 0;      // number of the token's message to that rank
  std::uint32_t peers = 0;       // threads with slots of the token at the same rank
  bool leads = false;            // the first of its peers
  std::int32_t direct_row = -1;  // its row's position at that rank, or -1
};

// A tile for a token that is sent: with a thread for each slot and, where tokens go to every rank, for each
// rank.
template <class Traits>
__device__ __forceinline__ TokenTile sending_tile(const LaneView& lane) {
  return TokenTile::of(Traits::kToEveryRank ? max(lane.top_k, lane.ranks) : lane.top_k);
}

// The rank whose message this thread leads, if it leads one: that of its slot. If tokens go to every rank,
// thread j of a tile leads the message to rank j, independently of its slot.
template <class Traits>
__device__ __forceinline__ int led_rank(const TokenTile& tile, const OutgoingSlot& slot) {
  if constexpr (Traits::kToEveryRank) return tile.slot();
  return slot.rank;
}

// [warp] Fills in the message that this thread leads, where tokens go to every rank: messages are numbered by
// their tokens. `token`: of the tile; there is none from `end` on.
__device__ __forceinline__ void lead_to_every_rank(const LaneView& lane, const TokenTile& tile,
                                                   std::int32_t token, std::int32_t end, OutgoingSlot* slot) {
  slot->message = token;
  slot->leads = token < end && tile.slot() < lane.ranks;
  slot->peers = 0;
#pragma unroll 1
  for (int rank = 0; rank < lane.ranks; ++rank) {
    const std::uint32_t there = __ballot_sync(~0u, slot->rank == rank);
    if (tile.slot() == rank) slot->peers = there & tile.mask(tile.index());
  }
}

// The planners below have two functions:
//   next(tile, first, end)  [warp] the slots of the next tokens in [first, end), one token for each tile
//   finish(tile, token)     called by the threads of a tile when the token's row has been sent

// Plans tokens from ids, for the receivers and for the plan. A warp's tokens, in order.
template <class Traits>
struct RoutePlanner {
  const SendContext& context;
  std::int32_t* counts;  // the warp's row of RouteCounts
  InputSlot ahead;       // of the next tokens
  PlannedSlot slot{};    // of the current tokens
  std::int32_t row = -1;

  __device__ __forceinline__ OutgoingSlot next(const TokenTile& tile, std::int32_t first, std::int32_t end) {
    const LaneView& lane = context.call.lane;
    const InputSlot input = ahead;
    slot = plan_slots<Traits>(lane, context.tables, tile, counts, input.id.value(context.call));
    // Loads the ids of the next tokens while the rows of these are in flight.
    ahead = InputSlot::of(context.call, tile, first + tile.per_warp(), end);
    row = lane.layout == Layout::rank_major ? slot.message : slot.ordinal;
    if (slot.rank < 0) row = -1;
    if (context.has_row_offsets)
      row = row_at_destination(lane, context.tables, context.offsets, slot.physical, slot.rank, row);
    OutgoingSlot out{.rank = slot.rank,
                     .ordinal = slot.ordinal,
                     .weight = input.weight,
                     .message = slot.message,
                     .peers = slot.peers,
                     .leads = slot.leads,
                     .direct_row = row};
    if (slot.rank >= 0) out.group = group_of(lane, context.tables, slot.physical, slot.rank);
    if constexpr (Traits::kToEveryRank) lead_to_every_rank(lane, tile, first + tile.index(), end, &out);
    return out;
  }

  // Writes the plan's entries of the token. Without row offsets route_row gets ordinals, which
  // fill_route_rows() turns into rows later.
  __device__ __forceinline__ void finish(const TokenTile& tile, std::int64_t token) const {
    const LaneView& lane = context.call.lane;
    const PlanView& plan = context.call.plan;
    const int at = tile.slot();
    if (at < lane.top_k) {
      const std::int64_t route = token * lane.top_k + at;
      plan.route_expert[route] = slot.id;
      plan.route_rank[route] = slot.rank;
      plan.route_row[route] = row;
    }
    if constexpr (Traits::kToEveryRank) {
      if (at >= lane.ranks) return;
      plan.token_ranks[token * lane.most_ranks + at] = at;
      plan.sent_tokens[std::int64_t{at} * lane.max_tokens + token] = static_cast<std::int32_t>(token);
      return;
    }
    if (slot.leads) {
      const int rank_index =
          kWide ? slot.rank_index : __popc(static_cast<int>(slot.ranks & ((1u << slot.rank) - 1)));
      plan.token_ranks[token * lane.most_ranks + rank_index] = slot.rank;
      plan.sent_tokens[std::int64_t{slot.rank} * lane.max_tokens + slot.message] =
          static_cast<std::int32_t>(token);
    }
    if (at >= (kWide ? slot.rank_count : __popc(static_cast<int>(slot.ranks))) && at < lane.most_ranks)
      plan.token_ranks[token * lane.most_ranks + at] = -1;
  }
};

// Finds only the destinations of tokens, from ids: mode of few tokens, where metadata blocks do the rest. A
// message's number is its token's.
template <class Traits>
struct DestinationPlanner {
  const SendContext& context;
  InputSlot ahead;  // of the next tokens

  __device__ __forceinline__ OutgoingSlot next(const TokenTile& tile, std::int32_t first, std::int32_t end) {
    if constexpr (Traits::kToEveryRank) {
      const std::int32_t token = first + tile.index();
      return {.message = token, .leads = token < end && tile.slot() < context.call.lane.ranks};
    }
    const int me = static_cast<int>(threadIdx.x % 32);
    const std::int64_t id = ahead.id.value(context.call);
    ahead = InputSlot::of(context.call, tile, first + tile.per_warp(), end);
    OutgoingSlot slot{.message = first + tile.index()};
    if (classify_id(id, context.call.lane.experts) == IdKind::expert)
      slot.rank = context.tables.rank_of[context.tables.physical_of[id]];
    slot.peers = __match_any_sync(~0u, slot.rank >= 0 ? slot.rank : -1 - me) & tile.mask(tile.index());
    slot.leads = slot.rank >= 0 && (slot.peers & ((1u << me) - 1)) == 0;
    return slot;
  }
  __device__ __forceinline__ void finish(const TokenTile&, std::int64_t) const {}
};

// [warp] Sends the metadata of this thread's slot of token `token` to each rank that gets a message of the
// token. kTokenIndexed: messages are indexed by token, and the metadata carries the message's number instead
// of the token. With gathered input the receiver's number is its rank.
template <bool kTokenIndexed, class Traits>
__device__ __forceinline__ void send_slot_metadata(const SendContext& context, const TokenTile& tile,
                                                   const Destination& to, std::int32_t token,
                                                   const OutgoingSlot& slot) {
  std::uint32_t left = __ballot_sync(~0u, slot.leads) & tile.mask(tile.index());
#pragma unroll 1
  while (__any_sync(~0u, left != 0)) {
    const int leader = max(__ffs(static_cast<int>(left)) - 1, 0);
    const int receiver = __shfl_sync(~0u, led_rank<Traits>(tile, slot), leader),
              message = __shfl_sync(~0u, slot.message, leader);
    auto* packets = pointer_of(to.metadata, leader);
    const SlotMetadata metadata{.token = kTokenIndexed ? message : token,
                                .group = slot.rank == receiver ? slot.group : SlotMetadata::kElsewhere,
                                .first_of_lower = !Traits::kToEveryRank && slot.leads && slot.rank < receiver,
                                .ordinal = slot.ordinal,
                                .weight = slot.weight};
    if (left != 0 && tile.slot() < context.call.lane.top_k)
      store_packet_relaxed_sys(packets + tile.slot(), metadata.packet(context.number));
    left &= left - 1;
  }
}

// One sending warp.
template <class Traits>
struct TokenSender {
  const SendContext& context;
  const DispatchArguments& call;
  TokenTile tile;
  WireCounter sent{};

  __device__ explicit TokenSender(const SendContext& of)
      : context(of), call(of.call), tile(sending_tile<Traits>(of.call.lane)) {}

  // [warp] Sends the segments of worker `worker`. `planner` plans their tokens; `stream` loads their rows and
  // has issued its first loads.
  template <class Planner>
  __device__ __forceinline__ void send_segments(const SendPartition& partition, int worker, Planner& planner,
                                                RowStream<InputRowIterator> stream) {
    const std::int32_t begin = partition.segment_begin(worker), end = partition.token_end(worker);
    // If rows are cut, a warp has at most one segment.
    const Quarters quarters =
        Quarters::of(begin & ((1 << partition.log2_segments) - 1), partition.log2_segments);
    const bool streams = uses_stream<Traits>(call, partition.log2_segments);
#pragma unroll 1
    for (std::int32_t first = begin >> partition.log2_segments; first < end; first += tile.per_warp()) {
      const std::int32_t token = first + tile.index();
      const OutgoingSlot slot = planner.next(tile, first, end);
      const int to_rank = led_rank<Traits>(tile, slot);
      // A direct write goes to the token's first row at the rank, whose receiver copies the others from it.
      const std::uint32_t with_row = __ballot_sync(~0u, slot.direct_row >= 0) & slot.peers;
      const std::int32_t direct_row =
          __shfl_sync(~0u, slot.direct_row, max(__ffs(static_cast<int>(with_row)) - 1, 0));
      const Destination to =
          context.destination(slot.leads, to_rank, slot.message, with_row != 0 ? direct_row : -1);
      if (quarters.first == 0) {
        inject_fault(call.lane, KernelPoint::metadata);
        if constexpr (!Traits::kFewTokens) send_slot_metadata<false, Traits>(context, tile, to, token, slot);
        sent.add(slot.leads && to_rank != call.lane.rank);
      }
      const std::uint32_t travel = __ballot_sync(~0u, to.row != nullptr);
      const int tokens = min(tile.per_warp(), end - first);
#pragma unroll 1
      for (int t = 0; t < tokens; ++t) {
        inject_fault(call.lane, KernelPoint::row);
        send_row<Traits>(call, first + t, {to, travel & tile.mask(t)}, quarters, streams, stream);
        Flag* flag = tile.index() == t && slot.leads ? to.flags + quarters.first : nullptr;
        context.publish_flag(flag, first + t + 1 == end);
      }
      // The plan's entries come last: no peer waits for them.
      if (quarters.first == 0 && token < end) planner.finish(tile, token);
    }
    context.publisher->close();
    if (threadIdx.x % 32 == 0) sent.publish(call);
  }
};

// [warp] Mode of few tokens: sends the metadata of tokens [begin, end), whose rows other blocks send, to all
// ranks, and writes the plan's entries of these tokens. `counts`: the warp's row of RouteCounts.
template <class Traits>
__device__ __forceinline__ void send_metadata(const SendContext& context, std::int32_t* counts,
                                              std::int32_t begin, std::int32_t end) {
  const LaneView& lane = context.call.lane;
  const TokenTile tile = sending_tile<Traits>(lane);
  const int parity = context.parity();
  RoutePlanner<Traits> planner{context, counts, InputSlot::of(context.call, tile, begin, end)};
#pragma unroll 1
  for (std::int32_t first = begin; first < end; first += tile.per_warp()) {
    const std::int32_t token = first + tile.index();
    const OutgoingSlot slot = planner.next(tile, first, end);
    Destination to;
    if (slot.leads)
      to.metadata = memory::slot_metadata(lane, led_rank<Traits>(tile, slot), parity, lane.rank, token);
    inject_fault(lane, KernelPoint::metadata);
    send_slot_metadata<true, Traits>(context, tile, to, token, slot);
    if (token >= end) continue;
    const LLPacket none = SlotMetadata{.token = SlotMetadata::kNoMessage}.packet(context.number);
    for (int rank = 0; !Traits::kToEveryRank && rank < lane.ranks; ++rank) {
      if ((planner.slot.ranks >> rank & 1) != 0 || tile.slot() >= lane.top_k) continue;
      store_packet_relaxed_sys(memory::slot_metadata(lane, rank, parity, lane.rank, token) + tile.slot(),
                               none);
    }
    planner.finish(tile, token);
  }
}

// [warp] Turns the ordinals that RoutePlanner has left in the plan's route_row into rows, for tokens [begin,
// end). Call it when row offsets are known.
__device__ inline void fill_route_rows(const LaneView& lane, const BlockTables& tables,
                                       const RowOffsets& offsets, const PlanView& plan, std::int64_t begin,
                                       std::int64_t end) {
  const TokenTile tile = TokenTile::of(lane.top_k);
  for (std::int64_t token = begin + tile.index(); token < end; token += tile.per_warp()) {
    if (tile.slot() >= lane.top_k) continue;
    const std::int64_t route = token * lane.top_k + tile.slot();
    const std::int32_t expert = plan.route_expert[route];
    if (expert < 0) continue;
    const int physical = tables.physical_of[expert];
    plan.route_row[route] =
        row_at_destination(lane, tables, offsets, physical, tables.rank_of[physical], plan.route_row[route]);
  }
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
