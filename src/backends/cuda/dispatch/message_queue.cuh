// Which messages a warp that receives looks for, and in which order.
#pragma once

#include "backends/cuda/dispatch/row_offsets.cuh"

namespace ferry::cuda {

// How messages are shared out: worker, worker + workers, ... of `units`, in the order they are thought to
// come.
struct Turns {
  int worker, workers, units, splits;
  bool rotate;  // or a worker would have the same rank's messages each time, which are not all alike
};
// A thread's message.
struct ComingMessage {
  int source = 0, i = 0;
  Quarters quarters{0, kQuarters};
};

// In how many shares each source sends a row, 1 << splits: a bit of that for each source.
struct SourceSplits {
  std::uint32_t low, high;

  // By a whole warp: of the source that is this thread's.
  __device__ __forceinline__ static SourceSplits of(int splits) {
    return {__ballot_sync(~0u, (splits & 1) != 0), __ballot_sync(~0u, (splits & 2) != 0)};
  }
  // The flags (one bit each) of the shares that some quarters of a row of `source` come in.
  __device__ __forceinline__ std::uint32_t flags(int source, const Quarters& quarters) const {
    const unsigned splits = (low >> source & 1) | (high >> source & 1) << 1;
    const std::uint32_t first_of_shares = 0x0f0501u >> (8 * splits) & 0xf;
    const int share = kQuarters >> splits, first = quarters.first & -share;
    return ((1u << quarters.last) - (1u << first)) & first_of_shares;
  }
};

// What is known of the messages to this rank.
struct Incoming {
  const DispatchArguments& call;
  RowOffsets places;
  const std::int32_t* runs;       // [R] of messages, side by side
  const std::int32_t* tokens_of;  // [R] of sources whose messages lie by token; -1: by number
  std::uint64_t number;

  __device__ static int slot() { return static_cast<int>(threadIdx.x % 32); }
  __device__ int parity() const { return static_cast<int>(number & 1); }
  __device__ bool by_token(int source) const { return tokens_of[source] >= 0; }

  // Where there may be messages of a source.
  __device__ int messages_of(int source) const {
    const std::int32_t tokens = tokens_of[source];
    return tokens >= 0 ? tokens : places.between[source * call.lane.ranks + call.lane.rank];
  }

  // Threads not in `pending` take the warp's next messages. Returns the threads that have one.
  __device__ __forceinline__ std::uint32_t fill(const Turns& turns, std::uint32_t pending, int* step,
                                                ComingMessage* mine) const {
    const LaneView& lane = call.lane;
    while (pending != ~0u && turns.worker + *step * turns.workers < turns.units) {
      const bool takes = (pending >> slot() & 1) == 0;
      const int at = *step + __popc(static_cast<int>(~pending & ((1u << slot()) - 1))),
                unit = turns.worker + at * turns.workers, turn = unit >> turns.splits,
                of_rank = lane.by_ranks.quotient(turn);
      // This rank's own first.
      int next = turn - of_rank * lane.ranks;
      if (turns.rotate) next += at - lane.by_ranks.quotient(at) * lane.ranks;
      if (next >= lane.ranks) next -= lane.ranks;
      next += lane.rank;
      const int source = next < lane.ranks ? next : next - lane.ranks;
      const int i = takes && unit < turns.units ? message_at(source, of_rank) : -1;
      if (takes) *mine = {source, i, Quarters::of(unit - (turn << turns.splits), turns.splits)};
      *step += __popc(static_cast<int>(~pending));
      pending |= __ballot_sync(~0u, i >= 0);
    }
    return pending;
  }

  // Takes those out of `pending` that are not in `before` and whose message there is none of, as their notes
  // say, which are waited for; and takes others in their place if nothing else is left. False: the call has
  // ended early.
  __device__ __forceinline__ bool drop_absent(const Turns& turns, std::uint32_t before,
                                              std::uint32_t* pending, int* step, ComingMessage* mine) const {
    for (;;) {
      bool ended = false;
      const bool looks = ((*pending & ~before) >> slot() & 1) != 0 && by_token(mine->source);
      const bool absent = looks && !await_message(mine->source, mine->i, &ended);
      *pending &= ~__ballot_sync(~0u, absent);
      if (__any_sync(~0u, ended)) return false;
      if (*pending != 0 || turns.worker + *step * turns.workers >= turns.units) return true;
      *pending = fill(turns, 0, step, mine);
      before = 0;
    }
  }

  // Whether `source` sends a message of its token `i`: its first note, waited for, says so.
  __device__ __forceinline__ bool await_message(int source, int i, bool* ended) const {
    const LaneView& lane = call.lane;
    const LLPacket* unit = lane.slot_notes(lane.rank, parity(), source, i);
    LLPacket seen = load_packet_relaxed_sys(unit);
#pragma unroll 1
    for (unsigned look = 0; seen.call >> SlotMetadata::kTokenBits < number; ++look) {
      if (look >= kQuickPolls) {
        *ended =
            wait_long(lane, &unit->call, nullptr,
                      {Operation::dispatch, number, source, SlotMetadata::kTokenBits}) != WaitResult::yes;
        if (*ended) return false;
      }
      seen = load_packet_relaxed_sys(unit);
    }
    return SlotMetadata::of(seen).token != SlotMetadata::kNoMessage;
  }

  // The message of `source` that comes in turn `at`, or -1. It is a guess where runs begin, as if all were
  // equally long: what comes earlier or later than thought is taken all the same.
  __device__ int message_at(int source, int at) const {
    const int messages = messages_of(source), count = runs[source];
    if (messages <= count) return at < messages ? at : -1;
    const int each = messages / count, more = messages - each * count, i = at / count, run = at - i * count;
    return i < each + (run < more) ? run * each + min(run, more) + i : -1;
  }
};

}  // namespace ferry::cuda
