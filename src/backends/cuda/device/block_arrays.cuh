// The arrays that a block of dispatch keeps in its shared memory. Where each lies is reckoned by the host:
// device code adds an index, and holds no address.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cuda/dispatch/dispatch.hpp"

namespace ferry::cuda {

// A block's shared memory. Named, not pointed to: the compiler then knows what it is, and that nothing stored
// elsewhere changes it.
extern __shared__ __align__(128) std::byte block_memory[];

template <class T>
struct BlockArray {
  std::int32_t at;

  __device__ __forceinline__ T& operator[](int i) const { return reinterpret_cast<T*>(block_memory + at)[i]; }
};

// As RoutingTables: the block's copy.
struct BlockTables {
  BlockArray<const std::int64_t> capacity;
  BlockArray<const std::int32_t> first_expert;
  BlockArray<const std::uint16_t> position_of, expert_at;
  BlockArray<const std::uint8_t> rank_of;

  __device__ __forceinline__ static BlockTables of(const DispatchArguments& call) {
    const BlockOffsets& at = call.shared;
    return {{at.capacity}, {at.first_expert}, {at.position_of}, {at.expert_at}, {at.rank_of}};
  }
};

// Groups are this rank's experts; rank_major: the source ranks.
struct RowOffsets {
  BlockArray<std::int32_t> from_me;  // [E] by position: the first row there of routes from this rank;
                                     // rank_major: [R]
  BlockArray<std::int32_t> here;     // [G, R] first row here of (group, source); rank_major: [R]
  BlockArray<std::int32_t> begin;    // [G+1] first row of a group, then the total
  BlockArray<std::int32_t> count;    // [G] rows of a group
  BlockArray<std::int32_t> between;  // [R, R] messages from a rank to a rank
  BlockArray<std::uint32_t> offset;  // [E] aligned rows of all positions before this one, over all ranks

  __device__ __forceinline__ static RowOffsets of(const DispatchArguments& call) {
    const BlockOffsets& at = call.shared;
    return {{at.from_me}, {at.here}, {at.begin}, {at.count}, {at.between}, {at.offset}};
  }
};

}  // namespace ferry::cuda
