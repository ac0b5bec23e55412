// Where a kernel finds what the ranks of a lane share in memory.
#pragma once

#include "backends/cuda/protocol/lane_view.hpp"

namespace ferry::cuda::inline FERRY_WIDTH::memory {

__device__ __forceinline__ std::byte* section(const LaneView& lane, int rank_of_memory) {
  if constexpr (kWide) {
    if (lane.ranks > kNarrowRanks)
      return reinterpret_cast<std::byte* const*>(lane.symmetric[0])[rank_of_memory];
  }
  return lane.symmetric[rank_of_memory];
}
template <class T = std::byte>
__device__ __forceinline__ T* at(const LaneView& lane, int rank_of_memory, std::int64_t offset) {
  return reinterpret_cast<T*>(section(lane, rank_of_memory) + offset);
}
__device__ __forceinline__ LLPacket* header(const LaneView& lane, int at_rank, int parity, int source) {
  return at<LLPacket>(lane, at_rank, lane.signals.header(parity, source));
}
__device__ __forceinline__ ErrorRecord* refusal(const LaneView& lane, int at_rank, int parity, int source) {
  return at<ErrorRecord>(lane, at_rank, lane.signals.header(parity, source) + lane.signals.refusal_offset);
}
__device__ __forceinline__ Flag* end_of_stream_flag(const LaneView& lane, Payload payload, int at_rank,
                                                    int parity, int source) {
  return at<Flag>(lane, at_rank, lane.signals.end_of_stream_flag(static_cast<int>(payload), parity, source));
}
__device__ __forceinline__ Flag* dispatch_flags(const LaneView& lane, int at_rank, int parity, int source,
                                                std::int32_t i) {
  return at<Flag>(lane, at_rank, lane.signals.dispatch_flags(parity, source, i));
}
// Slot metadata of a message: of its first slot; the others follow.
__device__ __forceinline__ LLPacket* slot_metadata(const LaneView& lane, int at_rank, int parity, int source,
                                                   std::int32_t i) {
  return at<LLPacket>(lane, at_rank, lane.signals.slot_metadata(parity, source, i));
}
__device__ __forceinline__ Flag* combine_flags(const LaneView& lane, int at_rank, int parity,
                                               std::int32_t row) {
  return at<Flag>(lane, at_rank, lane.signals.combine_flags(parity, row));
}
// A row of combine that travels as LL packets; numbered as in staging.
__device__ __forceinline__ std::byte* ll_row(const LaneView& lane, int at_rank, int parity,
                                             std::int32_t row) {
  return at(lane, at_rank, lane.signals.ll_row(parity, row));
}
__device__ __forceinline__ std::byte* message(const LaneView& lane, int at_rank, int parity, int source,
                                              std::int32_t i, std::int32_t bytes) {
  return at(lane, at_rank, lane.exchange.messages_of(0, parity, source) + std::int64_t{i} * bytes);
}
// Part 0 of a received row, in the lane's own receive buffers at that rank.
__device__ __forceinline__ std::byte* received_row(const LaneView& lane, int at_rank, std::int32_t row,
                                                   std::int32_t row_bytes) {
  return at(lane, at_rank, lane.receive_buffers + std::int64_t{row} * row_bytes);
}
__device__ __forceinline__ std::byte* combine_row(const LaneView& lane, int at_rank, int parity,
                                                  std::int32_t row) {
  return at(lane, at_rank,
            lane.exchange.combine_of(0, parity) +
                std::int64_t{row} * static_cast<std::int32_t>(lane.exchange.shape.combine_row_bytes));
}
}  // namespace ferry::cuda::inline FERRY_WIDTH::memory
