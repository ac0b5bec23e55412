// The receiving role's messages and slots: the queue of messages that a warp waits for, in the order in which
// they should arrive; from a message's metadata the rows of its slots, recorded in the plan and in the
// result.
#pragma once

#include "backends/cuda/dispatch/row_offsets.cuh"
#include "backends/cuda/dispatch/store_parts.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// How row segments are divided among receiving warps: worker, worker + workers, ... of `items`.
struct ReceivePartition {
  int worker, workers, items, log2_segments;
  bool rotate;  // moves a warp on by one rank each time; otherwise a worker would get the same rank's
                // messages always, and ranks do not send the same amount
};

// The row segment that a thread waits for.
struct ExpectedMessage {
  int source = 0, index = 0;  // index: of the message among its source's, as MessageQueue has it
  Quarters quarters{0, kQuarters};
};

// Segments of a row, by source: 1 << log2_segments, with one bit of the logarithm in each mask.
struct SourceSegments {
  std::uint32_t low, high;

  // [warp] From the logarithm of the source that is this thread's.
  __device__ __forceinline__ static SourceSegments of(int log2_segments) {
    return {__ballot_sync(~0u, (log2_segments & 1) != 0), __ballot_sync(~0u, (log2_segments & 2) != 0)};
  }
  // The flags (one bit each) of the source's segments that contain some quarters of a row. A segment has the
  // flag of its first quarter.
  __device__ __forceinline__ std::uint32_t flags(int source, const Quarters& quarters) const {
    const unsigned log2_segments = (low >> source & 1) | (high >> source & 1) << 1;
    const std::uint32_t first_quarters = 0x0f0501u >> (8 * log2_segments) & 0xf;
    const int segment = kQuarters >> log2_segments, first = quarters.first & -segment;
    return ((1u << quarters.last) - (1u << first)) & first_quarters;
  }
};

// The messages to this rank. A message's index is its number, or its token where the source's header says so
// (HeaderFacts::token_indexed); then there may be no message at an index.
struct MessageQueue {
  const DispatchArguments& call;
  RowOffsets offsets;
  const std::int32_t*
      sender_warps;  // [R] warps that send, by source: each sends consecutive messages in order
  const std::int32_t*
      indexed_tokens;    // [R] tokens of sources whose messages are indexed by token; otherwise -1
  std::uint64_t number;  // of the call

  __device__ static int slot() { return static_cast<int>(threadIdx.x % 32); }
  __device__ int parity() const { return static_cast<int>(number & 1); }
  __device__ bool token_indexed(int source) const { return indexed_tokens[source] >= 0; }

  // Indices at which there may be a message from `source`.
  __device__ int messages_from(int source) const {
    const std::int32_t tokens = indexed_tokens[source];
    if constexpr (kWide) return tokens >= 0 ? tokens : offsets.messages[source];
    return tokens >= 0 ? tokens : offsets.messages[source * call.lane.ranks + call.lane.rank];
  }

  // [warp] Gives the warp's next items to the threads that are not in `pending`; returns the threads that
  // then have one. `step`: items taken so far.
  __device__ __forceinline__ std::uint32_t fill(const ReceivePartition& partition, std::uint32_t pending,
                                                int* step, ExpectedMessage* mine) const {
    const LaneView& lane = call.lane;
    while (pending != ~0u && partition.worker + *step * partition.workers < partition.items) {
      const bool takes = (pending >> slot() & 1) == 0;
      const int at = *step + __popc(static_cast<int>(~pending & ((1u << slot()) - 1))),
                item = partition.worker + at * partition.workers, row_index = item >> partition.log2_segments,
                nth = lane.by_ranks.quotient(row_index);
      // This rank's own messages come first.
      int next = row_index - nth * lane.ranks;
      if (partition.rotate) next += at - lane.by_ranks.quotient(at) * lane.ranks;
      if (next >= lane.ranks) next -= lane.ranks;
      next += lane.rank;
      const int source = next < lane.ranks ? next : next - lane.ranks;
      const int index = takes && item < partition.items ? expected_at(source, nth) : -1;
      if (takes)
        *mine = {source, index,
                 Quarters::of(item - (row_index << partition.log2_segments), partition.log2_segments)};
      *step += __popc(static_cast<int>(~pending));
      pending |= __ballot_sync(~0u, index >= 0);
    }
    return pending;
  }

  // [warp] Removes the threads from `pending` whose index has no message, and gives them other items once
  // nothing else is pending. Only threads that are not in `before` are looked at. Waits for their metadata.
  // False: the call was aborted.
  __device__ __forceinline__ bool drop_absent(const ReceivePartition& partition, std::uint32_t before,
                                              std::uint32_t* pending, int* step,
                                              ExpectedMessage* mine) const {
    for (;;) {
      bool aborted = false;
      const bool looks = ((*pending & ~before) >> slot() & 1) != 0 && token_indexed(mine->source);
      const bool absent = looks && !await_presence(mine->source, mine->index, &aborted);
      *pending &= ~__ballot_sync(~0u, absent);
      if (__any_sync(~0u, aborted)) return false;
      if (*pending != 0 || partition.worker + *step * partition.workers >= partition.items) return true;
      *pending = fill(partition, 0, step, mine);
      before = 0;
    }
  }

  // [thread] Whether `source` sends a message for its token `token`. Waits for the metadata of its first
  // slot, which says so.
  __device__ __forceinline__ bool await_presence(int source, int token, bool* aborted) const {
    const LaneView& lane = call.lane;
    const LLPacket* packet = memory::slot_metadata(lane, lane.rank, parity(), source, token);
    LLPacket loaded = load_packet_relaxed_sys(packet);
#pragma unroll 1
    for (unsigned look = 0; loaded.call >> SlotMetadata::kTokenBits < number; ++look) {
      if (look >= kQuickPolls) {
        *aborted =
            wait_long(lane, packet, nullptr,
                      {Operation::dispatch, number, source, SlotMetadata::kTokenBits}) != WaitResult::ready;
        if (*aborted) return false;
      }
      loaded = load_packet_relaxed_sys(packet);
    }
    return SlotMetadata::of(loaded).token != SlotMetadata::kNoMessage;
  }

  // The index of the message from `source` that should arrive `at`-th; -1: none. Assumes that all sending
  // warps have the same number of messages. A wrong guess costs time only: every message is waited for once.
  __device__ int expected_at(int source, int at) const {
    const int messages = messages_from(source), warps = sender_warps[source];
    if (messages <= warps) return at < messages ? at : -1;
    const int each = messages / warps, more = messages - each * warps, i = at / warps, warp = at - i * warps;
    return i < each + (warp < more) ? warp * each + min(warp, more) + i : -1;
  }
};

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
