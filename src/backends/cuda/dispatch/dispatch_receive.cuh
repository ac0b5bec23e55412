// The receiving role of dispatch: waits for messages in any order and stores each row at the rows of its
// experts.
#pragma once

#include "backends/cuda/dispatch/receive_rows.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// One receiving warp. It watches up to 32 row segments at once, one a thread, and stores those that are
// ready, a tile for each message.
template <class Traits>
struct Receiver {
  const DispatchArguments& call;
  ReceiveContext context;

  __device__ static int slot() { return static_cast<int>(threadIdx.x % 32); }

  // [warp] Receives all segments of warp `worker` of `workers`. Returns false if the call was aborted.
  __device__ bool receive_all(int worker, int workers) const {
    const LaneView& lane = call.lane;
    const MessageQueue& queue = context.queue;
    const int messages = slot() < lane.ranks ? queue.messages_from(slot()) : 0;
    ReceivePartition partition{worker, workers, 0, 0, false};
    int all_messages = messages;
    if constexpr (kWide) {
      for (int source = slot() + 32; source < lane.ranks; source += 32)
        all_messages += queue.messages_from(source);
    }
    // A computed row needs a whole warp. Few rows that are only copied are cut twice as fine, so that the
    // last message to arrive is copied by more warps.
    const int hands = Traits::kFewTokens && !Traits::quantises(call) ? 2 * workers : workers;
    partition.log2_segments =
        Traits::computes(call) ? 0 : log2_segments_for(__reduce_add_sync(~0u, all_messages), hands);
    int most = messages;
    const std::int32_t* warps = queue.sender_warps;
    if (messages > warps[slot()]) most = (messages + warps[slot()] - 1) / warps[slot()] * warps[slot()];
    if constexpr (kWide) {
      for (int source = slot() + 32; source < lane.ranks; source += 32) {
        const int theirs = queue.messages_from(source), each = warps[source];
        most = max(most, theirs > each ? (theirs + each - 1) / each * each : theirs);
      }
    }
    partition.items = __reduce_max_sync(~0u, most) * lane.ranks << partition.log2_segments;
    partition.rotate =
        partition.log2_segments == 0 && lane.by_ranks.quotient(workers) * lane.ranks == workers;
    const TokenTile tile = TokenTile::of(lane.top_k);
    ExpectedMessage mine;
    int step = 0;
    std::uint32_t pending = queue.fill(partition, 0, &step, &mine);
    // One message a tile at most: metadata is read and recorded while the rows are in flight.
    if (!Traits::by_plan(call) && __popc(static_cast<int>(pending)) <= tile.per_warp() &&
        worker + step * workers >= partition.items)
      return pending == 0 || receive_few(tile, pending, mine);
    if (!queue.drop_absent(partition, 0, &pending, &step, &mine)) return false;
    while (pending != 0) {
      // Every segment also waits for the first quarter's flag. Where messages are indexed by number, the warp
      // that sends that quarter has written the metadata.
      ReadyMask ready = await_some(mine, pending, 1);
      if ((ready.ready | ready.finished) == 0) return false;
      pending &= ~(ready.ready | ready.finished);
#pragma unroll 1
      for (std::uint32_t here = ready.ready; here != 0;) {
        const TileMessage message = assign(tile, here, mine);
        ReceivedSlot received;
        if (!await_metadata<Traits>(context, tile, message, peek_metadata(context, tile, message), &received))
          return false;
        store_rows<Traits>(context, tile, (1u << min(__popc(static_cast<int>(here)), tile.per_warp())) - 1,
                           message, received);
        record_slots<Traits>(context, tile, message, received);
        for (int t = 0; t < tile.per_warp(); ++t) here &= here - 1;
      }
      const std::uint32_t before = pending;
      pending = queue.fill(partition, pending, &step, &mine);
      if (!queue.drop_absent(partition, before, &pending, &step, &mine)) return false;
    }
    return true;
  }

 private:
  __device__ __forceinline__ const Flag* flags_of(const ExpectedMessage& mine) const {
    return memory::dispatch_flags(call.lane, call.lane.rank, context.parity(), mine.source, mine.index);
  }
  // The flags of this thread's segment, and `others`.
  __device__ __forceinline__ std::uint32_t wanted(const ExpectedMessage& mine, std::uint32_t others) const {
    return context.segments.flags(mine.source, mine.quarters) | others;
  }
  // [warp] Waits until some of the threads in `pending` have their flags.
  __device__ __forceinline__ ReadyMask await_some(const ExpectedMessage& mine, std::uint32_t pending,
                                                  std::uint32_t others) const {
    const LaneView& lane = call.lane;
    // Only a damaged plan promises messages that never come: its waits end at the source's end-of-stream
    // flag.
    const Flag* end_of_stream =
        Traits::by_plan(call)
            ? memory::end_of_stream_flag(lane, Payload::rows, lane.rank, context.parity(), mine.source)
            : nullptr;
    const ReadyMask ready =
        wait_any(lane, flags_of(mine), (pending >> slot() & 1) != 0 ? wanted(mine, others) : 0, end_of_stream,
                 {Operation::dispatch, context.number(), mine.source});
    if ((ready.finished >> slot() & 1) != 0 && mine.quarters.first == 0)
      record_bad_source(lane, std::int64_t{mine.source} * lane.max_tokens + mine.index);
    return ready;
  }

  // [warp] The threads in `pending` that have their flags now.
  __device__ __forceinline__ std::uint32_t ready_now(const ExpectedMessage& mine,
                                                     std::uint32_t pending) const {
    return acquire_flags(flags_of(mine), (pending >> slot() & 1) != 0 ? wanted(mine, 0) : 0,
                         context.number());
  }

  // [warp] Receives the messages of the threads in `all`, at most one for each tile.
  __device__ __forceinline__ bool receive_few(const TokenTile& tile, std::uint32_t all,
                                              const ExpectedMessage& mine) const {
    TileMessage message = assign(tile, all, mine);
    ReceivedSlot received;
    const LLPacket loaded = peek_metadata(context, tile, message);
    // Rows from this rank do not travel and need no flag. The flags of the others are loaded together with
    // the metadata.
    const std::uint32_t own = all & __ballot_sync(~0u, mine.source == call.lane.rank && !call.own_staged);
    std::uint32_t here = ready_now(mine, all & ~own) | own;
    if (!await_metadata<Traits>(context, tile, message, loaded, &received)) return false;
    // Where messages are indexed by token there may be none.
    const bool absent = received.message == SlotMetadata::kNoMessage;
    std::uint32_t pending = all;
    const std::uint32_t none = __ballot_sync(~0u, message.valid && absent);
    message.valid = message.valid && !absent;
    int tile_of = 0;
    for (std::uint32_t left = none == 0 ? 0 : all; left != 0; left &= left - 1, ++tile_of)
      if ((none & tile.mask(tile_of)) != 0) pending &= ~(left & ~left + 1);
    bool recorded = false;
#pragma unroll 1
    while (pending != 0) {
      ReadyMask ready{here & pending, 0};
      if (ready.ready == 0) {
        // Nothing is ready to be stored: record meanwhile. Ready rows go first, because the caller's next
        // kernel waits for the last row.
        if (!recorded) record_slots<Traits>(context, tile, message, received);
        recorded = true;
        ready = await_some(mine, pending, 0);
        if (ready.ready == 0) return false;
      }
      pending &= ~ready.ready;
      std::uint32_t tiles = 0;
      for (std::uint32_t left = ready.ready; left != 0; left &= left - 1)
        tiles |= 1u << __popc(static_cast<int>(all & ((left & ~left + 1) - 1)));
      store_rows<Traits>(context, tile, tiles, message, received);
      here = pending == 0 ? 0 : ready_now(mine, pending);
    }
    if (!recorded) record_slots<Traits>(context, tile, message, received);
    return true;
  }

  // [warp] Gives each tile the message of one of the first threads in `threads`.
  __device__ __forceinline__ TileMessage assign(const TokenTile& tile, std::uint32_t threads,
                                                const ExpectedMessage& mine) const {
    const std::uint32_t nth = tile.nth_thread(threads);
    const bool valid = nth < 32;
    const int from = valid ? static_cast<int>(nth) : 0;
    return {valid,
            __shfl_sync(~0u, mine.source, from),
            __shfl_sync(~0u, mine.index, from),
            {__shfl_sync(~0u, mine.quarters.first, from), __shfl_sync(~0u, mine.quarters.last, from)}};
  }
};

}  // namespace ferry::cuda::inline FERRY_WIDTH
