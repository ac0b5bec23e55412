// The message queue: the messages that a receiving warp waits for, in the order in which they should arrive.
#pragma once

#include "backends/cuda/device/row_copy.cuh"
#include "backends/cuda/dispatch/row_offsets.cuh"
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

}  // namespace ferry::cuda::inline FERRY_WIDTH
