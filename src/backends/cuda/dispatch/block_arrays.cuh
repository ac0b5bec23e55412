// The arrays in a dispatch block's shared memory. The host computes their offsets; device code adds an index
// to an offset, so no register holds an address.
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

}  // namespace ferry::cuda::inline FERRY_WIDTH
