// Publishes flags: one warp of a block sets the flags for rows that the block's other warps have stored.
//
// A flag must become visible after the row it stands for. The fence that ensures this waits for all stores
// that the block has in flight. The publisher warp does nothing else, so the storing warps never wait for a
// fence, and one fence serves every request that has come in since the last.
//
// Why the order holds, from a storing thread to a reader on another GPU:
//   1. the storing warp's __syncwarp() orders all its threads' stores before its first thread's next store;
//   2. that thread store-releases the queue's length `requested` (block scope);
//   3. the publisher warp load-acquires `requested`, so the rows are ordered before what it does next;
//   4. the publisher's fence (system scope) orders the rows before the flags;
//   5. the reader load-acquires the flag (system scope, wait.cuh).
#pragma once

#include "backends/cuda/device/ptx.cuh"
#include "backends/cuda/protocol/wait.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

inline constexpr std::uint32_t kQueuedFlags = 64;  // requests of a warp that may be pending

__device__ __forceinline__ void set_flags(Flag* first, int count, std::uint64_t call) {
  if (count == 1) return store_relaxed_sys(first, call);
  for (int i = 0; i < count; i += 2) store_two_relaxed_sys(first + i, call);
}

// [thread] Sets 1, 2 or 4 flags without the publisher. The warp's stores must be ordered before by a
// __syncwarp().
__device__ __forceinline__ void publish_now(Flag* first, int count, std::uint64_t call) {
  // Release at system scope: the rows before the flags.
  fence_acq_rel_sys();
  set_flags(first, count, call);
}

// Lies in shared memory: a queue of requests for each of the kWarps storing warps of the block.
template <int kWarps>
struct FlagPublisher {
  // A request: the address of the first flag, with the number of flags (1, 2 or 4) in the low bits.
  std::uint64_t requests[kWarps][kQueuedFlags];
  std::uint32_t requested[kWarps], published[kWarps];  // counts of requests, by warp
  std::uint32_t closed;                                // warps that will not request any more

  // [block] Call __syncthreads() before use.
  __device__ void reset() {
    if (threadIdx.x < kWarps) requested[threadIdx.x] = published[threadIdx.x] = 0;
    if (threadIdx.x == 0) closed = 0;
  }

  // [warp] Requests, after the warp's stores, `count` flags from `first` on for every thread that `wants`
  // some.
  __device__ void enqueue(bool wants, Flag* first, int count) {
    const int warp = static_cast<int>(threadIdx.x / 32), thread = static_cast<int>(threadIdx.x % 32);
    const std::uint32_t all = __ballot_sync(~0u, wants), before = requested[warp];
    const auto more = static_cast<std::uint32_t>(__popc(static_cast<int>(all)));
    // Acquire: the publisher has read the queue entries that are overwritten next.
    while (before + more - load_acquire_block(&published[warp]) > kQueuedFlags) __nanosleep(20);
    if (wants) {
      const std::uint32_t at =
          before + static_cast<std::uint32_t>(__popc(static_cast<int>(all & ((1u << thread) - 1))));
      requests[warp][at % kQueuedFlags] =
          reinterpret_cast<std::uint64_t>(first) | static_cast<unsigned>(count);
    }
    // The barrier orders all threads' rows and requests before the count that the publisher acquires.
    __syncwarp();
    if (thread == 0) store_release_block(&requested[warp], before + more);
    __syncwarp();
  }

  // [warp] Announces that this warp requests no more.
  __device__ void close() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) count_in_block(&closed);
  }

  // [warp] Body of the publisher warp: returns when all storing warps have closed and every flag is set.
  __device__ void run(const LaneView& lane, std::uint64_t call) {
    const int warp = static_cast<int>(threadIdx.x % 32);  // this thread serves that warp's queue
    const bool has = warp < kWarps;
    std::uint32_t done = 0;
    for (;;) {
      const bool last = __all_sync(~0u, load_acquire_block(&closed) == kWarps);
      // Acquire: the rows that the warp has stored.
      const std::uint32_t wanted = has ? load_acquire_block(&requested[warp]) : 0;
      if (!__any_sync(~0u, wanted != done)) {
        if (last) return;
        __nanosleep(20);
        continue;
      }
      inject_fault(lane, KernelPoint::flag);
      __syncwarp();
      // Release at system scope: the acquired rows before the flags.
      fence_acq_rel_sys();
      for (; done != wanted; ++done) publish(requests[warp][done % kQueuedFlags], call);
      if (has) store_release_block(&published[warp], done);
    }
  }

 private:
  __device__ static void publish(std::uint64_t request, std::uint64_t call) {
    auto* first = reinterpret_cast<Flag*>(request & ~std::uint64_t{7});
    set_flags(first, static_cast<int>(request & 7), call);
  }
};

}  // namespace ferry::cuda::inline FERRY_WIDTH
