// The receiving role's slots: waits for a message's metadata, computes the rows of its slots, and records
// them in the plan and in the dispatch result.
#pragma once

#include "backends/cuda/dispatch/message_queue.cuh"
#include "backends/cuda/dispatch/row_position.cuh"
#include "backends/cuda/dispatch/store_parts.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// A receiving warp's view of its block and call.
struct ReceiveContext {
  const DispatchArguments& call;
  BlockTables tables;
  RowOffsets offsets;
  MessageQueue queue;
  std::uint32_t direct_writers;  // ranks that have written rows to their final position here, one bit each
  SourceSegments segments;       // into which each source rank cuts its rows
  std::byte* memory;             // of the warp's stream

  __device__ std::uint64_t number() const { return queue.number; }  // of the call
  __device__ int parity() const { return queue.parity(); }

  __device__ const std::byte* message_of(int source, std::int64_t index) const {
    return memory::message(call.lane, call.lane.rank, parity(), source, index, call.message.bytes);
  }
};

// The message of this thread's tile.
struct TileMessage {
  bool valid;
  int source, index;  // as in ExpectedMessage
  Quarters quarters;  // this warp's; the warp of the first quarter records the slots
};

// This thread's slot of its tile's message, once its metadata is known.
struct ReceivedSlot {
  SlotMetadata metadata;   // .token: the message's token
  std::int32_t message;    // its number
  std::int32_t row;        // or -1
  int rank_index;          // of this rank among the token's destinations, ascending
  std::uint32_t with_row;  // threads of the warp whose slot has a row
};

__device__ __forceinline__ const LLPacket* metadata_of(const ReceiveContext& context, const TokenTile& tile,
                                                       const TileMessage& message) {
  return memory::slot_metadata(context.call.lane, context.call.lane.rank, context.parity(), message.source,
                               message.index) +
         tile.slot();
}

// [thread] Loads this thread's metadata, ready or not.
__device__ __forceinline__ LLPacket peek_metadata(const ReceiveContext& context, const TokenTile& tile,
                                                  const TileMessage& message) {
  LLPacket loaded{};
  if (message.valid && tile.slot() < context.call.lane.top_k)
    loaded = load_packet_relaxed_sys(metadata_of(context, tile, message));
  return loaded;
}

// [warp] Waits for the metadata of each tile's message and computes its slots' rows. `loaded`:
// peek_metadata()'s result. False: the call was aborted.
template <class Traits>
__device__ __forceinline__ bool await_metadata(const ReceiveContext& context, const TokenTile& tile,
                                               const TileMessage& message, LLPacket loaded,
                                               ReceivedSlot* received) {
  const DispatchArguments& call = context.call;
  const LaneView& lane = call.lane;
  const int slot = tile.slot();
  const bool has = message.valid && slot < lane.top_k;
  const LLPacket* packet = metadata_of(context, tile, message);
  const std::int64_t entry =
      (std::int64_t{message.source} * lane.max_tokens + message.index) * lane.top_k + slot;
  // The load is issued before the wait.
  std::int32_t row = has && Traits::by_plan(call) ? call.plan.received_rows_of_message[entry] : -1;
  bool aborted = false;
  if (has && loaded.call >> SlotMetadata::kTokenBits < context.number()) {
    aborted = wait_long(lane, packet, nullptr,
                        {Operation::dispatch, context.number(), message.source, SlotMetadata::kTokenBits}) !=
              WaitResult::ready;
    loaded = load_packet_relaxed_sys(packet);
  }
  if (__any_sync(~0u, aborted)) return false;
  SlotMetadata metadata;
  if (has) metadata = SlotMetadata::of(loaded);
  // Threads without a slot take the token from the tile's first thread.
  metadata.token = __shfl_sync(~0u, metadata.token, tile.index() * tile.size());
  std::int32_t message_number = message.index;
  if (context.queue.token_indexed(message.source)) {
    message_number = metadata.token;
    metadata.token = message.index;
  }
  if (has && !Traits::by_plan(call)) {
    row = row_of_received_slot(lane, context.offsets, message.source, message_number, metadata.group,
                               metadata.ordinal);
  } else if (row != -1 && !valid_entry(lane, row, context.offsets.group_begin[lane.groups], entry)) {
    row = -1;
  }
  int rank_index = lane.rank;
  if constexpr (!Traits::kToEveryRank) {
    const std::uint32_t lower = __ballot_sync(~0u, metadata.first_of_lower) & tile.mask(tile.index());
    rank_index = __popc(static_cast<int>(lower));
  }
  *received = {metadata, message_number, row, rank_index, __ballot_sync(~0u, row >= 0)};
  return true;
}

// [warp] Writes the plan's and the result's entries of each tile's message, each thread for its slot.
template <class Traits>
__device__ __forceinline__ void record_slots(const ReceiveContext& context, const TokenTile& tile,
                                             const TileMessage& message, const ReceivedSlot& received) {
  const DispatchArguments& call = context.call;
  const LaneView& lane = call.lane;
  const bool rank_major = lane.layout == Layout::rank_major;
  const std::uint32_t with_row = received.with_row & tile.mask(tile.index());
  std::int32_t token_row = -1;  // rank_major: the token's one row
  if (rank_major) token_row = __shfl_sync(~0u, received.row, max(__ffs(static_cast<int>(with_row)) - 1, 0));
  if (!message.valid || message.quarters.first != 0) return;
  const std::int64_t where = std::int64_t{message.source} * lane.max_tokens + received.message;
  const int slot = tile.slot();
  const SlotMetadata& metadata = received.metadata;
  const std::int32_t row = received.row;
  if (!Traits::by_plan(call)) {
    if (slot < lane.top_k) call.plan.received_rows_of_message[where * lane.top_k + slot] = row;
    if (slot == 0) {
      call.plan.received_token[where] = metadata.token;
      call.plan.received_position[where] = received.rank_index;
    }
    if (row >= 0) call.plan.sources[row] = {message.source, metadata.token, rank_major ? -1 : slot};
  }
  if (!rank_major) {
    if (row < 0) return;
    if (call.weight != nullptr) call.weight[row] = metadata.weight;
    // A damaged plan may give a row to a slot whose expert is on no rank, or on another.
    if (call.group_of_row != nullptr) call.group_of_row[row] = max(metadata.group, 0);
    return;
  }
  if (with_row == 0) return;
  if (slot == 0 && call.group_of_row != nullptr) call.group_of_row[token_row] = message.source;
  if (slot >= lane.top_k) return;
  call.local_ids[std::int64_t{token_row} * lane.top_k + slot] = metadata.group;
  if (call.weight != nullptr)
    call.weight[std::int64_t{token_row} * lane.top_k + slot] = metadata.group >= 0 ? metadata.weight : 0.0f;
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
