// Row positions: the row of a route is the first row of its (expert, source rank) plus the route's ordinal,
// the number of earlier routes from that source to that expert. The sender and the receiver of a message
// compute the same row.
#pragma once

#include "backends/cuda/dispatch/block_arrays.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// The group, at rank `rank`, of its expert `physical`: those of the shared experts come first.
__device__ __forceinline__ int group_of(const LaneView& lane, const BlockTables& tables, int physical,
                                        int rank) {
  return physical - tables.first_physical[rank] + lane.shared_experts;
}

// At the sender: the row, at rank `rank`, of this rank's route to the expert `physical`. -1: masked, or
// dropped because it is past the capacity. rank_major: `ordinal` is the number of the token's message to that
// rank.
__device__ __forceinline__ std::int32_t row_at_destination(const LaneView& lane, const BlockTables& tables,
                                                           const RowOffsets& offsets, int physical, int rank,
                                                           std::int32_t ordinal) {
  if (physical < 0) return -1;
  // This rank's memory may have room for fewer rows: ReceiveBuffers::rows.
  const std::int64_t capacity = rank == lane.rank ? lane.capacity : tables.capacity[rank];
  const int from = lane.layout == Layout::rank_major ? rank : physical;
  const std::int64_t row = std::int64_t{offsets.own_first_row[from]} + ordinal;
  if (row >= capacity) return -1;
  const int group = group_of(lane, tables, physical, rank);
  return static_cast<std::int32_t>(lane.layout == Layout::expert_padded ? group * capacity + row : row);
}

// At the receiver: the row, at this rank, of a slot in message `message` from `source`. `group`: of its
// expert here. -1: the slot is for another rank or masked (`group` -1), or dropped.
__device__ __forceinline__ std::int32_t row_of_received_slot(const LaneView& lane, const RowOffsets& offsets,
                                                             int source, std::int64_t message, int group,
                                                             std::int32_t ordinal) {
  if (group < 0) return -1;
  if (lane.layout == Layout::rank_major) {
    const std::int64_t row = std::int64_t{offsets.first_row[source]} + message;
    return row < lane.capacity ? static_cast<std::int32_t>(row) : -1;
  }
  const std::int64_t row = std::int64_t{offsets.first_row[group * lane.ranks + source]} + ordinal;
  if (row >= lane.capacity) return -1;
  const std::int64_t base = lane.layout == Layout::expert_padded ? group * lane.capacity : 0;
  return static_cast<std::int32_t>(base + row);
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
