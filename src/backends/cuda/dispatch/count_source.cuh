// Reads the counts of all ranks, from which row offsets are computed.
#pragma once

#include "backends/cuda/dispatch/block_arrays.cuh"
#include "backends/cuda/dispatch/dispatch_traits.cuh"
#include "backends/cuda/protocol/call_header.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"
#include "backends/cuda/protocol/plan_entries.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

inline constexpr int kHeadersAtOnce = 4;  // headers whose words a thread loads at the same time

// The counts of all ranks: from the call headers in a dispatch from ids, otherwise from the plan, where a
// count that no routing can have is taken as 0 and recorded.
template <class Traits>
struct CountSource {
  const DispatchArguments& call;
  BlockTables tables;
  std::uint64_t number;  // call number

  // [thread] Waits for word `i` of the counts of every rank and calls use(source, word) in the order of
  // ranks. False: the call was aborted.
  template <class Use>
  __device__ __forceinline__ bool for_each_source(int i, Use use) const {
    const LaneView& lane = call.lane;
    const int ranks = lane.ranks;
    const LLPacket* header =
        memory::header(lane, lane.rank, static_cast<int>(number & 1), 0) + kHeaderCounts + i;
    const std::int64_t step =
        lane.signals.headers.source_stride / static_cast<std::int64_t>(sizeof(LLPacket));
#pragma unroll 1
    for (int first = 0; first < ranks; first += kHeadersAtOnce, header += kHeadersAtOnce * step) {
      LLPacket loaded[kHeadersAtOnce];
#pragma unroll 1
      for (unsigned looks = 0;; ++looks) {
        bool ready = true;
#pragma unroll
        for (int s = 0; s < kHeadersAtOnce; ++s) {
          loaded[s] = {number, 0};
          if (first + s < ranks) loaded[s] = load_packet_relaxed_sys(header + s * step);
          ready = ready && loaded[s].call >= number;
        }
        if (ready) break;
        if (looks >= kQuickPolls && !wait_for_headers(first, i)) return false;
      }
#pragma unroll
      for (int s = 0; s < kHeadersAtOnce; ++s) {
        if (first + s < ranks) use(first + s, loaded[s].word);
      }
    }
    return true;
  }
  // [thread] The long wait for word `i` of kHeadersAtOnce headers from `first` on. Values held across it
  // spill to local memory.
  __device__ bool wait_for_headers(int first, int i) const {
    const LaneView& lane = call.lane;
    const int end = min(first + kHeadersAtOnce, lane.ranks);
    for (int source = first; source < end; ++source) {
      const LLPacket* packet =
          memory::header(lane, lane.rank, static_cast<int>(number & 1), source) + kHeaderCounts + i;
      if (wait_long(lane, packet, nullptr, {Operation::dispatch, number, source}) != WaitResult::ready)
        return false;
    }
    return true;
  }
  // [thread] Stores the messages from every rank to `destination` in `messages`.
  __device__ __forceinline__ bool load_messages_to(int destination,
                                                   const BlockArray<std::int32_t>& messages) const {
    const LaneView& lane = call.lane;
    if (Traits::by_plan(call)) {
      for (int source = 0; source < lane.ranks; ++source) {
        const int where = source * lane.ranks + destination;
        const std::int32_t count = call.plan.tokens_between[where];
        messages[where] = valid_entry(lane, count, std::int64_t{lane.max_tokens} + 1, where) ? count : 0;
      }
      return true;
    }
    const int at = lane.signals.first_messages + destination;
    return for_each_source(at / 2, [&](int source, std::uint64_t word) {
      messages[source * lane.ranks + destination] =
          static_cast<std::int32_t>(at % 2 == 0 ? word : word >> 32);
    });
  }
  // [thread] Calls use(source, messages) for the messages from every rank to `destination`, in the order of
  // ranks. False: the call was aborted.
  template <class Use>
  __device__ __forceinline__ bool for_each_message_count(int destination, Use use) const {
    const LaneView& lane = call.lane;
    if (Traits::by_plan(call)) {
      for (int source = 0; source < lane.ranks; ++source) {
        const int where = source * lane.ranks + destination;
        const std::int32_t count = call.plan.tokens_between[where];
        use(source, valid_entry(lane, count, std::int64_t{lane.max_tokens} + 1, where) ? count : 0);
      }
      return true;
    }
    const int at = lane.signals.first_messages + destination;
    return for_each_source(at / 2, [&](int source, std::uint64_t word) {
      use(source, static_cast<std::int32_t>(at % 2 == 0 ? word : word >> 32));
    });
  }
  __device__ std::int32_t routes_in_plan(int source, int expert) const {
    const LaneView& lane = call.lane;
    const std::int64_t where = std::int64_t{source} * lane.experts + expert;
    const std::int32_t count = call.plan.counts[where];
    return valid_entry(lane, count, std::int64_t{lane.max_tokens} * lane.top_k + 1, where) ? count : 0;
  }
};

}  // namespace ferry::cuda::inline FERRY_WIDTH
