// The arrays in a dispatch block's shared memory, and row positions, which are computed from them. The host
// computes the arrays' offsets; device code adds an index to an offset, so no register holds an address.
//
// The row of a route is the first row of its (expert, source rank) plus the route's ordinal, the number of
// earlier routes from that source to that expert. The sender and the receiver of a message compute the same
// row.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cuda/device/routing_tables.hpp"
#include "backends/cuda/dispatch/dispatch.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

// A block's shared memory. Named rather than pointed to: the compiler then knows that it is shared memory,
// and that no store to other memory changes it.
extern __shared__ __align__(128) std::byte block_memory[];

template <class T>
struct BlockArray {
  std::int32_t at;

  __device__ __forceinline__ T& operator[](int i) const { return reinterpret_cast<T*>(block_memory + at)[i]; }
};

// The block's copy of the lane's RoutingTables.
struct BlockTables {
  BlockArray<const std::int64_t> capacity;
  BlockArray<const std::int32_t> first_physical;
  BlockArray<const std::uint16_t> physical_of, expert_of;
  BlockArray<const std::uint8_t> rank_of;

  __device__ __forceinline__ static BlockTables of(const DispatchArguments& call) {
    const BlockOffsets& at = call.shared;
    return {{at.capacity}, {at.first_physical}, {at.physical_of}, {at.expert_of}, {at.rank_of}};
  }
};

// Copies the lane's routing tables to shared memory in two steps, so that the block issues other loads in
// between.
struct RoutingTableCopy {
  static constexpr int kPerThread = static_cast<int>(
      (RoutingTables::bytes(kMaxExperts, kKernelRanks) / 16 + kBlockThreads - 1) / kBlockThreads);
  uint4 words[kPerThread];

  __device__ __forceinline__ static unsigned index(int i) {
    return threadIdx.x + i * unsigned{kBlockThreads};
  }
  // [block] Issues the loads.
  __device__ __forceinline__ void load(const LaneView& lane) {
    const auto count = static_cast<unsigned>(RoutingTables::bytes(lane.experts, lane.ranks)) / 16;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (index(i) < count) words[i] = reinterpret_cast<const uint4*>(lane.tables)[index(i)];
    }
  }
  // [block] Writes the words to shared memory. Call __syncthreads() before the tables are read.
  __device__ __forceinline__ void store(const LaneView& lane, std::byte* memory) const {
    const auto count = static_cast<unsigned>(RoutingTables::bytes(lane.experts, lane.ranks)) / 16;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (index(i) < count) reinterpret_cast<uint4*>(memory)[index(i)] = words[i];
    }
  }
};

// Where rows begin; compute_row_offsets() (row_offsets.cuh) fills it in from the counts of all ranks. The
// rows of a group belong to one local expert, an empty slot has none; rank_major: to one source rank.
struct RowOffsets {
  BlockArray<std::int32_t> own_first_row;  // [E] by physical index: first row, at the expert's rank, of the
                                           // routes from this rank; rank_major: [R] by destination
  BlockArray<std::int32_t> first_row;  // [G, R] first row here of (group, source); rank_major: [R] by source
  BlockArray<std::int32_t> group_begin;  // [G+1] first row of a group, then the total
  BlockArray<std::int32_t> group_count;  // [G+1] rows of a group; 0 for the total
  // [R, R] messages from a rank to a rank. Wide: [R] messages from a rank to this one; [R, R] would not fit.
  BlockArray<std::int32_t> messages;
  BlockArray<std::uint32_t>
      aligned_before;  // [E] aligned rows of all physical experts before this one, over all ranks

  __device__ __forceinline__ static RowOffsets of(const DispatchArguments& call) {
    const BlockOffsets& at = call.shared;
    return {{at.own_first_row}, {at.first_row}, {at.group_begin},
            {at.group_count},   {at.messages},  {at.aligned_before}};
  }
};

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
