// Where a sending warp stores a message.
#pragma once

#include "backends/cuda/device/row_copy.cuh"
#include "backends/cuda/dispatch/dispatch.hpp"
#include "backends/cuda/dispatch/row_offsets.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// The addresses of a message at its destination rank, in the thread that leads it; null in other threads.
struct Destination {
  std::byte* message = nullptr;  // in the rank's staging
  LLPacket* metadata = nullptr;  // of the message's slots
  std::byte* row = nullptr;  // part 0: in the message, or the final position (direct write); null: not sent
  Flag* flags = nullptr;     // of the message's segments

  __device__ __forceinline__ static Destination of(const LaneView& lane, int rank, int parity,
                                                   std::int32_t message, std::int32_t bytes) {
    Destination to;
    to.metadata = memory::slot_metadata(lane, rank, parity, lane.rank, message);
    to.message = memory::message(lane, rank, parity, lane.rank, message, bytes);
    to.flags = memory::dispatch_flags(lane, rank, parity, lane.rank, message);
    return to;
  }

  // [warp] Calls store(address) with the `mine` of each thread in `threads` (one bit each).
  template <class Store>
  __device__ __forceinline__ static void for_each(std::uint32_t threads, std::byte* mine, Store store) {
#pragma unroll 1
    for (; threads != 0; threads &= threads - 1) {
      const int thread = __ffs(static_cast<int>(threads)) - 1;
      store(pointer_of(mine, thread));
    }
  }
};

}  // namespace ferry::cuda::inline FERRY_WIDTH
