// One fp32 a route, from a token's home to its rows: in the notes that messages of dispatch use, which
// announce themselves.
#pragma once

#include "backends/cuda/dispatch/row_offsets.cuh"
#include "backends/cuda/protocol/diagnostics.cuh"
#include "backends/cuda/protocol/wait.cuh"
#include "layout/slot_metadata.hpp"

namespace ferry::cuda {

// A warp's share of the messages between this rank and all ranks, one rank's after the other's in turn.
struct ValueTurns {
  const LaneView& lane;
  std::int32_t messages;  // of the rank that is this thread's
  int unit, step, units;

  // By one warp, `worker` of `workers`.
  __device__ __forceinline__ ValueTurns(const LaneView& of, std::int32_t of_rank, int worker, int workers)
      : lane(of), messages(of_rank), unit(worker), step(workers) {
    units = __reduce_max_sync(~0u, messages) * lane.ranks;
  }
  // False: none is left.
  __device__ __forceinline__ bool next(int* rank, std::int32_t* i) {
#pragma unroll 1
    for (; unit < units; unit += step) {
      *i = lane.by_ranks.quotient(unit);
      const int turn = lane.rank + unit - *i * lane.ranks;
      *rank = turn < lane.ranks ? turn : turn - lane.ranks;
      if (*i >= __shfl_sync(~0u, messages, *rank)) continue;
      unit += step;
      return true;
    }
    return false;
  }
};

// By one warp: the K values of each token to every rank that has rows of it.
__device__ __forceinline__ void send_values(const LaneView& lane, std::uint64_t number, const float* values,
                                            ValueTurns turns, const PlanView& plan) {
  const int slot = threadIdx.x % 32, parity = static_cast<int>(number & 1);
  const std::int32_t tokens = plan.header->tokens;
  int rank;
  std::int32_t i;
  while (turns.next(&rank, &i)) {
    const std::int64_t where = std::int64_t{rank} * lane.max_tokens + i;
    const std::int32_t token = plan.sent_tokens[where];
    inject_fault(lane, Point::values);
    if (token < 0 || token >= tokens) {
      if (slot == 0) record_bad_source(lane, where);
    } else if (slot < lane.top_k) {
      const SlotMetadata note{.weight = values[std::int64_t{token} * lane.top_k + slot]};
      store_packet_relaxed_sys(lane.slot_notes(rank, parity, lane.rank, i) + slot, note.packet(number));
    }
  }
}

// By one warp: this thread's slot's value of message i, waited for. WaitResult::no: the sender has sent all
// others of `phase`, as only a damaged plan makes happen.
__device__ __forceinline__ WaitResult await_value(const LaneView& lane, Payload phase, Awaited awaited,
                                                  std::int32_t i, float* value) {
  const int slot = threadIdx.x % 32, parity = static_cast<int>(awaited.call & 1);
  const LLPacket* unit = lane.slot_notes(lane.rank, parity, awaited.peer, i) + slot;
  awaited.shift = SlotMetadata::kTokenBits;
  WaitResult came = WaitResult::yes;
  if (slot < lane.top_k) {
    LLPacket seen = load_packet_relaxed_sys(unit);
    if (seen.call >> awaited.shift < awaited.call) {
      came = wait_long(lane, &unit->call, lane.end_of_stream_flag(phase, lane.rank, parity, awaited.peer),
                       awaited);
      seen = load_packet_relaxed_sys(unit);
    }
    *value = SlotMetadata::of(seen).weight;
  }
  if (__any_sync(~0u, came == WaitResult::ended)) return WaitResult::ended;
  return __any_sync(~0u, came == WaitResult::no) ? WaitResult::no : WaitResult::yes;
}

}  // namespace ferry::cuda
