// The receiving role of dispatch: waits for messages in any order and stores each row at the rows of its
// experts.
#pragma once

#include "backends/cuda/dispatch/receive_metadata.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// [warp] Copies part 0 of each tile's message, all of it, to the rows of the tile's threads in `copies`.
__device__ __forceinline__ void copy_rows(const ReceiveContext& context, const TokenTile& tile,
                                          std::uint32_t tiles, const std::byte* from, std::uint32_t copies,
                                          std::int32_t row) {
  const DispatchArguments& call = context.call;
  const std::uint32_t some = __ballot_sync(~0u, copies != 0);
  std::uint32_t todo = 0;
#pragma unroll 1
  for (std::uint32_t left = tiles; left != 0; left &= left - 1) {
    const int t = __ffs(static_cast<int>(left)) - 1;
    todo |= (some >> (t << tile.log2_size) & 1) << t;
  }
  if (todo == 0) return;
  const auto bytes = static_cast<int>(call.parts.part[0].row_bytes);
  RowStream<CopiedRows> stream{context.memory, {tile, todo, from, bytes}};
  stream.start();
#pragma unroll 1
  for (; todo != 0; todo &= todo - 1) {
    const std::uint32_t to = __shfl_sync(~0u, copies, (__ffs(static_cast<int>(todo)) - 1) << tile.log2_size);
#pragma unroll 1
    for (int at = 0; at < bytes; at += stream.kPiece) {
      const auto piece = stream.take();
#pragma unroll 1
      for (std::uint32_t left = to; left != 0; left &= left - 1) {
        const std::int32_t one = __shfl_sync(~0u, row, __ffs(static_cast<int>(left)) - 1);
        piece.store(call.received_parts[0] + std::int64_t{one} * bytes, at, bytes);
      }
    }
  }
}

// Part 1 of each tile's message, in registers: this warp's quarters of it, loaded while part 0 is copied.
// Only for a small part that is the last one.
struct SmallPart {
  bool is;  // otherwise part 1 is stored by store_parts()
  ByteRange range;
  uint4 held[2];
};

// [warp] Issues the loads of a small part. The bytes of tiles whose flags are not ready yet are discarded,
// and loaded again when they are.
template <class Traits>
__device__ __forceinline__ SmallPart load_small_part(const ReceiveContext& context, const TokenTile& tile,
                                                     const TileMessage& message,
                                                     const ReceivedSlot& received) {
  const DispatchArguments& call = context.call;
  SmallPart small{false, {0, 0}, {}};
  if (!Traits::kSpecialised || call.parts.count != 2 || !moves_whole(call.parts.part[1])) return small;
  const auto bytes = static_cast<int>(call.parts.part[1].row_bytes);
  if (bytes > 32 * tile.size()) return small;
  if (Traits::kFewTokens) {
    // Segments of few tokens' rows: only unpacked scales of whole blocks, because their segments begin at
    // multiples of 16 bytes.
    if (!Traits::quantises(call) || call.encoding.packs_scales() || call.lane.hidden != 32 * bytes)
      return small;
  } else if (message.quarters.count() != kQuarters) {
    return small;
  }
  small.is = true;
  small.range = Traits::kFewTokens ? bytes_of_part<Traits>(call, 1, message.quarters) : ByteRange{0, bytes};
  const bool own = message.source == call.lane.rank && !call.own_staged;
  const std::byte* from =
      own ? token_row(call, 1, received.metadata.token)
          : context.message_of(message.source, message.index) + call.message.part_offset[1];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = small.range.begin + 16 * (tile.slot() + i * tile.size());
    if (message.valid && at < small.range.end) small.held[i] = *reinterpret_cast<const uint4*>(from + at);
  }
  return small;
}

// [warp] `row`: of this thread's slot; `with_row`: the tile's threads whose row gets the part.
__device__ __forceinline__ void store_small_part(const ReceiveContext& context, const TokenTile& tile,
                                                 std::uint32_t tiles, const SmallPart& small,
                                                 std::uint32_t with_row, std::int32_t row) {
  const DispatchArguments& call = context.call;
  const auto bytes = static_cast<int>(call.parts.part[1].row_bytes);
  std::uint32_t left = (tiles >> tile.index() & 1) != 0 ? with_row : 0;
#pragma unroll 1
  while (__any_sync(~0u, left != 0)) {
    const std::int64_t to = __shfl_sync(~0u, row, max(__ffs(static_cast<int>(left)) - 1, 0));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = small.range.begin + 16 * (tile.slot() + i * tile.size());
      if (left != 0 && at < small.range.end)
        *reinterpret_cast<uint4*>(call.received_parts[1] + to * bytes + at) = small.held[i];
    }
    left &= left - 1;
  }
}

// Messages of the tiles in `tiles` (one bit each). A thread has the message of its tile.
struct MessagesOfTiles {
  const TokenTile& tile;
  std::uint32_t tiles;
  const TileMessage& message;
  const ReceivedSlot& received;
};

// [warp] Stores parts [first, last) of the messages, one message after the other. `from`: part 0; `with_row`:
// the tile's threads whose row gets them.
template <class Traits>
__device__ void store_parts(const ReceiveContext& context, const MessagesOfTiles& arrived, int first,
                            int last, const std::byte* from, std::uint32_t with_row) {
  const DispatchArguments& call = context.call;
  const auto& [tile, all, message, received] = arrived;
  std::uint32_t tiles = all;
#pragma unroll 1
  for (; tiles != 0; tiles &= tiles - 1) {
    const int thread = (__ffs(static_cast<int>(tiles)) - 1) * tile.size();
    const std::uint32_t to = __shfl_sync(~0u, with_row, thread);
    const int source = __shfl_sync(~0u, message.source, thread),
              index = __shfl_sync(~0u, message.index, thread);
    const std::int32_t token = __shfl_sync(~0u, received.metadata.token, thread);
    const Quarters quarters{__shfl_sync(~0u, message.quarters.first, thread),
                            __shfl_sync(~0u, message.quarters.last, thread)};
    const auto* row = pointer_of(from, thread);
    const bool own = source == call.lane.rank && !call.own_staged;
#pragma unroll 1
    for (int p = first; p < last && to != 0; ++p) {
      const std::byte* part = row;
      if (p > 0)
        part =
            own ? token_row(call, p, token) : context.message_of(source, index) + call.message.part_offset[p];
      store_part<Traits>(call, p, part, received.row, to, quarters);
    }
  }
}

// [warp] Encodes the token's row at `row` as received row `to`. The group is found from the row, because a
// damaged plan may put rows into other groups than their metadata says.
static __device__ __noinline__ void encode_on_arrival(const ReceiveContext& context, const std::byte* row,
                                                      std::int32_t to) {
  const DispatchArguments& call = context.call;
  const LaneView& lane = call.lane;
  int group = 0;  // the last that begins at the row or before it: empty groups begin where the next one does
  for (int end = lane.groups; end - group > 1;) {
    const int middle = (group + end) / 2;
    (context.offsets.group_begin[middle] <= to ? group : end) = middle;
  }
  // By a damaged plan even a row of an empty slot: it gets the scale of any expert.
  const int physical =
                min(context.tables.first_physical[lane.rank] + group - lane.shared_experts, lane.experts - 1),
            expert = group < lane.shared_experts ? lane.experts + group : context.tables.expert_of[physical];
  encode_with_scale(call, row, to, call.input_scales[expert]);
}

// [warp] Computes each tile's rows from the row at `from`.
__device__ inline void compute_rows(const ReceiveContext& context, const TokenTile& tile, std::uint32_t tiles,
                                    const std::byte* from, std::uint32_t with_row,
                                    const ReceivedSlot& received) {
  const DispatchArguments& call = context.call;
  for (; tiles != 0; tiles &= tiles - 1) {
    const int thread = (__ffs(static_cast<int>(tiles)) - 1) * tile.size();
    const auto* row = pointer_of(from, thread);
    for (std::uint32_t left = __shfl_sync(~0u, with_row, thread); left != 0; left &= left - 1) {
      const int at = __ffs(static_cast<int>(left)) - 1;
      const std::int32_t to = __shfl_sync(~0u, received.row, at);
      const float weight = __shfl_sync(~0u, received.metadata.weight, at);
      if (call.input_scales != nullptr) {
        encode_on_arrival(context, row, to);
      } else {
        compute_row(call, row, to, weight);
      }
    }
  }
}

// [warp] Stores the rows of the messages of the tiles in `tiles` (one bit each), whose flags have been
// acquired.
template <class Traits>
__device__ __forceinline__ void store_rows(const ReceiveContext& context, const TokenTile& tile,
                                           std::uint32_t tiles, const TileMessage& message,
                                           const ReceivedSlot& received) {
  const DispatchArguments& call = context.call;
  const LaneView& lane = call.lane;
  std::uint32_t with_row = received.with_row & tile.mask(tile.index());
  // All slots of a rank_major message share the token's one row.
  if (lane.layout == Layout::rank_major) with_row &= ~with_row + 1;
  const bool own = message.source == lane.rank && !call.own_staged,
             direct = !kWide && !own && (context.direct_writers >> message.source & 1) != 0;
  const std::int32_t first = __shfl_sync(~0u, received.row, max(__ffs(static_cast<int>(with_row)) - 1, 0));
  const std::byte* staged = context.message_of(message.source, message.index);
  if (own) staged = token_row(call, 0, received.metadata.token);
  // A direct write has put the first row in its final position; the others are copied from there.
  const std::byte* from = staged;
  if (direct)
    from = call.received_parts[0] + std::int64_t{first} * static_cast<int>(call.parts.part[0].row_bytes);
  const std::uint32_t copies = direct ? with_row & (with_row - 1) : with_row;
  if (Traits::computes(call)) {
    compute_rows(context, tile, tiles, staged, with_row, received);
    if (call.apply_weights || call.input_scales != nullptr) return;
  }
  const SmallPart small = load_small_part<Traits>(context, tile, message, received);
  const MessagesOfTiles arrived{tile, tiles, message, received};
  // A segment of a row is one batch of loads, so a stream would gain nothing.
  if (moves_whole(call.parts.part[0]) && message.quarters.count() == kQuarters) {
    copy_rows(context, tile, tiles, from, copies, received.row);
  } else {
    store_parts<Traits>(context, arrived, 0, 1, from, copies);
  }
  if (small.is) return store_small_part(context, tile, tiles, small, with_row, received.row);
  if (call.parts.count > 1) store_parts<Traits>(context, arrived, 1, call.parts.count, from, with_row);
}

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
