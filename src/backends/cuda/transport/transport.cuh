// How a role stores into other ranks: the transport policy, a template parameter of roles that send between
// nodes. A kernel that takes PlainStores is compiled to the stores that it would have without a policy.
//
// Places. A place in another rank's symmetric memory is named by the address of the same place in this
// rank's own memory, as in NVSHMEM. All addresses below, flags included, are such own addresses.
//
// A policy has these members; `peer` may be any other rank:
//
//   is_staged(peer)                                        [thread]
//       Whether messages to `peer` have to be put: from send staging, where they are composed, or from the
//       outbox. Otherwise a role may put from anywhere, or store to at() without a copy.
//   at(lane, peer, place)                                  [thread]
//       The address at which this thread reaches `place` of a peer that is not staged.
//   put(lane, peer, place, from, bytes)                    [warp]
//       Copies what any thread of the warp has stored at `from`; addresses and bytes are multiples of 16.
//       Returns before the bytes have arrived.
//   put_with_signal(lane, peer, place, from, bytes, {flag, value})   [warp]
//       As put(), and sets the peer's flag after these bytes. Orders nothing else, so such a flag belongs to
//       one message.
//   signal(lane, peer, flag, value)                        [warp]
//       Sets the peer's flag after everything that this warp has read, and stored to a peer that is not
//       staged. To a staged peer it may overtake earlier puts and signals, also those of the same flag.
//   wait(lane, flag, value, end_of_stream, target)         [thread]
//       Waits until the own flag is at least `value`, the sender has finished, or the call has been aborted.
//       After `ready` this thread may read what the flag covers; other threads after a barrier.
//   acquire(flag, value)                                   [thread]
//       Gives the right to read that wait() gives, where another function of wait.cuh has found the flag set.
//
// The bytes of a staged message are read until they have arrived. So a place in send staging, or in the
// outbox, is free again when the receiver has said that it has read the message, as a credit does; nothing
// else waits for puts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cuda/device/row_copy.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"
#include "backends/cuda/protocol/wait.cuh"
#include "base/integers.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

// A flag that counts, and the count to wait for. Polled like a flag that holds a call number.
struct AwaitedCount {
  const Flag* flag;
  std::uint64_t value;
};
__device__ __forceinline__ std::uint64_t poll_relaxed(const AwaitedCount* count) {
  return load_relaxed_sys(count->flag) >= count->value ? ~std::uint64_t{0} : 0;
}
// Acquire: the writer's stores before the count happen before this thread's later reads.
__device__ __forceinline__ std::uint64_t poll_acquire(const AwaitedCount* count) {
  return load_acquire_sys(count->flag) >= count->value ? ~std::uint64_t{0} : 0;
}

// [thread] Waits until a flag reaches `value`, which need not be a call number; otherwise as wait_flag().
// `target` says which call and peer the wait is for.
__device__ __forceinline__ WaitResult wait_count(const LaneView& lane, const Flag* flag, std::uint64_t value,
                                                 const Flag* end_of_stream, WaitTarget target) {
  inject_fault(lane, KernelPoint::poll);
  if (load_acquire_sys(flag) >= value) return WaitResult::ready;
  const AwaitedCount awaited{flag, value};
  return wait_long(lane, &awaited, end_of_stream, target);
}

// The address of `place`, which is in this rank's symmetric memory, in the mapped memory of `peer`.
template <class T>
__device__ __forceinline__ T* mapped_at(const LaneView& lane, int peer, T* place) {
  return reinterpret_cast<T*>(memory::section(lane, peer) +
                              (reinterpret_cast<const std::byte*>(place) - memory::section(lane, lane.rank)));
}

// A flag of a peer, and the value that it is set to.
struct FlagValue {
  Flag* flag;
  std::uint64_t value;
};

// Peers whose memory is mapped, as on one host.
struct PlainStores {
  __device__ static bool is_staged(int) { return false; }

  template <class T>
  __device__ static T* at(const LaneView& lane, int peer, T* place) {
    return mapped_at(lane, peer, place);
  }

  __device__ static void put(const LaneView& lane, int peer, std::byte* place, const std::byte* from,
                             int bytes) {
    std::byte* to = mapped_at(lane, peer, place);
    // The barrier orders what the warp's threads have stored at `from`.
    __syncwarp();
    copy_granules<4>(from, {0, bytes},
                     [&](const Granules<4>& granules, int at) { granules.store(to, at, bytes); });
  }

  __device__ static void put_with_signal(const LaneView& lane, int peer, std::byte* place,
                                         const std::byte* from, int bytes, const FlagValue& announced) {
    put(lane, peer, place, from, bytes);
    signal(lane, peer, announced.flag, announced.value);
  }

  __device__ static void signal(const LaneView& lane, int peer, Flag* flag, std::uint64_t value) {
    inject_fault(lane, KernelPoint::flag);
    // The barrier orders the stores of all threads before the first thread's fence.
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    // Release at system scope: the warp's stores before the flag.
    fence_acq_rel_sys();
    store_relaxed_sys(mapped_at(lane, peer, flag), value);
  }

  __device__ static WaitResult wait(const LaneView& lane, const Flag* flag, std::uint64_t value,
                                    const Flag* end_of_stream, WaitTarget target) {
    return wait_count(lane, flag, value, end_of_stream, target);
  }

  __device__ static void acquire(const Flag*, std::uint64_t) {}
};

// Peers whose memory is mapped; some of them are treated as if it were not, so their messages go through send
// staging, as between hosts. This simulates nodes on one host, with the code of the roles for real ones.
struct Pretended : PlainStores {
  RankBits<kMaxDeviceRanks> remote;

  __device__ bool is_staged(int peer) const { return remote.has(peer); }
};

}  // namespace ferry::cuda::inline FERRY_WIDTH
