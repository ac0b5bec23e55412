// Sends one fp32 value for each route from a token's source rank to the ranks that hold its rows: combine's
// weights, or the operation route_values. Values travel in the slot-metadata packets of dispatch's messages,
// which carry the call number and need no flag.
#pragma once

#include "backends/cuda/protocol/diagnostics.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"
#include "backends/cuda/protocol/peer_messages.cuh"
#include "backends/cuda/protocol/wait.cuh"
#include "layout/device_signals.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

// Iterates over one warp's part of the messages between this rank and all ranks, round-robin over the ranks,
// so that all links are in use at once.
struct RouteValueIterator {
  const LaneView& lane;
  PeerMessages messages;
  int item, stride, items;

  // [warp] Worker `worker` of `workers` warps.
  __device__ __forceinline__ RouteValueIterator(const LaneView& of, const PeerMessages& with_peers,
                                                int worker, int workers)
      : lane(of), messages(with_peers), item(worker), stride(workers) {
    items = messages.most() * lane.ranks;
  }
  // [warp] The next message: index `i` among those of `rank`. False: none is left.
  __device__ __forceinline__ bool next(int* rank, std::int32_t* i) {
#pragma unroll 1
    for (; item < items; item += stride) {
      *i = lane.by_ranks.quotient(item);
      const int next_rank = lane.rank + item - *i * lane.ranks;
      *rank = next_rank < lane.ranks ? next_rank : next_rank - lane.ranks;
      if (*i >= messages.of(*rank)) continue;
      item += stride;
      return true;
    }
    return false;
  }
};

// [warp] Sends the K values of each token to every rank that holds rows of it. `values`: [N, K].
__device__ __forceinline__ void send_route_values(const LaneView& lane, std::uint64_t number,
                                                  const float* values, RouteValueIterator messages,
                                                  const PlanView& plan) {
  const int slot = threadIdx.x % 32, parity = static_cast<int>(number & 1);
  const std::int32_t tokens = plan.header->tokens;
  int rank;
  std::int32_t i;
  while (messages.next(&rank, &i)) {
    const std::int64_t entry = std::int64_t{rank} * lane.max_tokens + i;
    const std::int32_t token = plan.sent_tokens[entry];
    inject_fault(lane, KernelPoint::route_values);
    if (token < 0 || token >= tokens) {
      if (slot == 0) record_bad_source(lane, entry);
    } else if (slot < lane.top_k) {
      const SlotMetadata metadata{.weight = values[std::int64_t{token} * lane.top_k + slot]};
      store_packet_relaxed_sys(memory::slot_metadata(lane, rank, parity, lane.rank, i) + slot,
                               metadata.packet(number));
    }
  }
}

// [warp] Waits for the value of this thread's slot in message i of the awaited peer. WaitResult::end_of_data:
// the sender has finished `payload` and has not sent it, which only a damaged plan causes.
__device__ __forceinline__ WaitResult await_route_value(const LaneView& lane, Payload payload,
                                                        WaitTarget awaited, std::int32_t i, float* value) {
  const int slot = threadIdx.x % 32, parity = static_cast<int>(awaited.call & 1);
  const LLPacket* packet = memory::slot_metadata(lane, lane.rank, parity, awaited.peer, i) + slot;
  awaited.shift = SlotMetadata::kTokenBits;
  WaitResult result = WaitResult::ready;
  if (slot < lane.top_k) {
    LLPacket seen = load_packet_relaxed_sys(packet);
    if (seen.call >> awaited.shift < awaited.call) {
      result = wait_long(lane, packet,
                         memory::end_of_stream_flag(lane, payload, lane.rank, parity, awaited.peer), awaited);
      seen = load_packet_relaxed_sys(packet);
    }
    *value = SlotMetadata::of(seen).weight;
  }
  if (__any_sync(~0u, result == WaitResult::aborted)) return WaitResult::aborted;
  return __any_sync(~0u, result == WaitResult::end_of_data) ? WaitResult::end_of_data : WaitResult::ready;
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
