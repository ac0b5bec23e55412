// Announcing: one warp of a block sets the flags for what the block's other warps have stored.
//
// A flag must come after the stores it stands for, which takes a fence that waits for all the block has under
// way. With a warp that does nothing else, the others never wait for one, and one fence serves all that was
// asked for meanwhile.
#pragma once

#include "backends/cuda/device/ptx.cuh"
#include "backends/cuda/protocol/wait.cuh"

namespace ferry::cuda {

inline constexpr std::uint32_t kQueuedFlags = 64;  // flags a warp may have asked for that are not yet set

__device__ __forceinline__ void set_flags(std::uint64_t* first, int count, std::uint64_t call) {
  if (count == 1) return store_relaxed_sys(first, call);
  for (int i = 0; i < count; i += 2)
    store_packet_relaxed_sys(reinterpret_cast<LLPacket*>(first + i), {call, call});
}

// By a thread that sees what its warp has stored: 1, 2 or 4 flags.
__device__ __forceinline__ void publish_now(std::uint64_t* first, int count, std::uint64_t call) {
  // Release at system scope: the stores before the flags.
  fence_acq_rel_sys();
  set_flags(first, count, call);
}

// In shared memory. kWarps: of the block, that store and ask.
template <int kWarps>
struct FlagPublisher {
  std::uint64_t flags[kWarps]
                     [kQueuedFlags];  // address of the first flag, and how many in the low bits: 1, 2 or 4
  std::uint32_t asked[kWarps], made[kWarps];
  std::uint32_t closed;  // warps that ask no more

  // By the whole block; a barrier follows.
  __device__ void prepare() {
    if (threadIdx.x < kWarps) asked[threadIdx.x] = made[threadIdx.x] = 0;
    if (threadIdx.x == 0) closed = 0;
  }

  // By a whole warp after its stores: `count` flags from `first` on, of every thread that `wants` some.
  __device__ void ask(bool wants, std::uint64_t* first, int count) {
    const int warp = static_cast<int>(threadIdx.x / 32), thread = static_cast<int>(threadIdx.x % 32);
    const std::uint32_t all = __ballot_sync(~0u, wants), before = asked[warp];
    const auto more = static_cast<std::uint32_t>(__popc(static_cast<int>(all)));
    // Acquire: the announcing warp's reads of the places that are taken again.
    while (before + more - load_acquire_block(&made[warp]) > kQueuedFlags) __nanosleep(20);
    if (wants) {
      const std::uint32_t at =
          before + static_cast<std::uint32_t>(__popc(static_cast<int>(all & ((1u << thread) - 1))));
      flags[warp][at % kQueuedFlags] = reinterpret_cast<std::uint64_t>(first) | static_cast<unsigned>(count);
    }
    // All threads' stores, by the barrier, and the list before the word that the announcing warp acquires.
    __syncwarp();
    if (thread == 0) store_release_block(&asked[warp], before + more);
    __syncwarp();
  }

  // By a whole warp that asks no more.
  __device__ void close() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) count_in_block(&closed);
  }

  // By the announcing warp: returns when all others have closed and all is announced.
  __device__ void run(const LaneView& lane, std::uint64_t call) {
    const int warp = static_cast<int>(threadIdx.x % 32);  // whose list is this thread's
    const bool has = warp < kWarps;
    std::uint32_t done = 0;
    for (;;) {
      const bool last = __all_sync(~0u, load_acquire_block(&closed) == kWarps);
      // Acquire: what the warp has stored.
      const std::uint32_t wanted = has ? load_acquire_block(&asked[warp]) : 0;
      if (!__any_sync(~0u, wanted != done)) {
        if (last) return;
        __nanosleep(20);
        continue;
      }
      inject_fault(lane, Point::flag);
      __syncwarp();
      // Release at system scope: what has been acquired before the flags.
      fence_acq_rel_sys();
      for (; done != wanted; ++done) set(flags[warp][done % kQueuedFlags], call);
      if (has) store_release_block(&made[warp], done);
    }
  }

 private:
  __device__ static void set(std::uint64_t entry, std::uint64_t call) {
    auto* first = reinterpret_cast<std::uint64_t*>(entry & ~std::uint64_t{7});
    set_flags(first, static_cast<int>(entry & 7), call);
  }
};

}  // namespace ferry::cuda
