// Device-side waiting: polls a flag until it is set, the call is aborted, or the deadline expires.
#pragma once

#include "backends/cuda/device/ptx.cuh"
#include "backends/cuda/protocol/lane_view.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

inline constexpr std::uint64_t kExchangeFailed =
    ~0ull;  // LaneState::aborted_call once the whole exchange has failed

// [thread] Whether the host has aborted the exchange. A failure of an earlier epoch is over.
__device__ __forceinline__ bool exchange_failed(const LaneView& lane) {
  return load_relaxed_sys(&lane.report->abort) >= lane.epoch->number;
}

// [thread] Whether this thread is the first of the exchange to time out in the epoch: it writes the record.
__device__ __forceinline__ bool claims_timeout(const LaneView& lane) {
  const auto epoch = static_cast<unsigned>(lane.epoch->number);
  return atomicMax(lane.timeout_claimed, epoch) < epoch;
}

#if FERRY_TEST_HOOKS
// [thread] Fault injection for tests: before the step that `point` names, stalls until the exchange has
// failed, or pauses for a random time. Always inlined: a call would keep the caller's registers in memory,
// even on paths that never make it.
__device__ __forceinline__ void inject_fault(const LaneView& lane, KernelPoint point) {
  if (lane.fault_injection.any == 0) return;
  if (lane.fault_injection.stall == point) {
    // The host's monitor sets the abort word. The long sleep keeps many stalled threads off the PCIe link.
    while (!exchange_failed(lane)) __nanosleep(500'000);
  }
  std::uint32_t random = static_cast<std::uint32_t>(clock64()) * 2654435761u + threadIdx.x * 40503u;
  random ^= random >> 15;
  random *= 2246822519u;
  random ^= random >> 13;
  if ((random & 255u) < lane.fault_injection.probability)
    __nanosleep(__umulhi(random, lane.fault_injection.max_pause_ns));
}
#else
// [thread] Production kernels have no fault injection.
__device__ __forceinline__ void inject_fault(const LaneView&, KernelPoint) {}
#endif

// [thread] Whether `call`, or the whole exchange, has been aborted on this rank. Acquire: the reason, written
// before the abort, may be read afterwards.
__device__ __forceinline__ bool is_aborted(const LaneView& lane, std::uint64_t call) {
  return load_acquire_gpu(&lane.state->aborted_call) >= call;
}

// [thread] Aborts `call`, or with kExchangeFailed this and all later calls of the lane. Raises the flag and
// never lowers it: a block that aborts its call because of a mismatch may be later than another block of the
// call that has found the exchange failed. Release: the reason, written before.
__device__ __forceinline__ void set_aborted(const LaneView& lane, std::uint64_t call) {
  raise_release_gpu(&lane.state->aborted_call, call);
}

// The flag of which call a wait is for, and the peer to blame if it does not come.
struct WaitTarget {
  Operation operation;
  std::uint64_t call;
  int peer;
  int shift = 0;  // the call number starts at this bit of the flag's word
};

// [thread] The first wait of the exchange to time out writes the record for the host; then every call ends.
static __device__ __noinline__ void report_timeout(const LaneView& lane, WaitTarget awaited,
                                                   std::uint64_t seen) {
  if (claims_timeout(lane)) {
    WaitRecord* record = &lane.report->timeout;
    record->operation = awaited.operation;
    record->call = awaited.call;
    record->rank = lane.rank;
    record->peer = awaited.peer;
    record->expected = awaited.call;
    record->observed = seen;
    record->via = -1;  // the report is memory that was zeroed
    // Release at system scope: the host reads the record after this word.
    store_release_sys(&lane.report->timed_out, lane.epoch->number);
  }
  set_aborted(lane, kExchangeFailed);
}

enum class WaitResult {
  ready,        // the flag was set
  end_of_data,  // the sender finished without setting it
  aborted       // the call was aborted: refusal, mismatch, timeout or peer failure
};

// Polling the host's abort word costs microseconds over PCIe, so long waits do it at this interval.
inline constexpr std::uint64_t kAbortPollIntervalNs = 1'000'000;

// Polls before a wait starts to pause between polls.
inline constexpr unsigned kQuickPolls = 16;

// [thread] One poll of a flag, or of the call number of an LL packet, which is loaded whole.
__device__ __forceinline__ std::uint64_t poll_relaxed(const Flag* flag) {
  return load_relaxed_sys(flag);
}
__device__ __forceinline__ std::uint64_t poll_relaxed(const LLPacket* packet) {
  return load_packet_relaxed_sys(packet).call;
}
// Acquire: the writer's stores before the flag happen before this thread's later reads. A packet orders
// nothing: any thread that loads it after this poll gets its payload.
__device__ __forceinline__ std::uint64_t poll_acquire(const Flag* flag) {
  return load_acquire_sys(flag);
}
__device__ __forceinline__ std::uint64_t poll_acquire(const LLPacket* packet) {
  return poll_relaxed(packet);
}

// [thread] The long wait for a flag or an LL packet, after the first polls.
template <class Awaited>
static __device__ __noinline__ WaitResult wait_long(const LaneView& lane, const Awaited* flag,
                                                    const Flag* end_of_stream, WaitTarget awaited) {
  const std::uint64_t start = global_nanoseconds();
  std::uint64_t next_abort_poll = start + kAbortPollIntervalNs;
  for (unsigned poll = 1;; ++poll) {
    // Poll with relaxed loads: an acquire invalidates the SM's L1 cache. Acquire once, when the flag is set.
    const std::uint64_t seen = poll_relaxed(flag) >> awaited.shift;
    if (seen >= awaited.call && poll_acquire(flag) >> awaited.shift >= awaited.call) return WaitResult::ready;
    if (poll < kQuickPolls) continue;
    // Waiting warps share the memory system with the warps that move rows.
    __nanosleep(100);
    if (poll % 16 != 0) continue;
    if (is_aborted(lane, awaited.call)) return WaitResult::aborted;
    // Acquire: every flag of the sender was set before its end-of-stream flag, so one more look at the flag
    // decides.
    if (end_of_stream != nullptr && load_acquire_sys(end_of_stream) >= awaited.call) {
      return poll_acquire(flag) >> awaited.shift >= awaited.call ? WaitResult::ready
                                                                 : WaitResult::end_of_data;
    }
    inject_fault(lane, KernelPoint::poll);
    const std::uint64_t now = global_nanoseconds();
    if (now < next_abort_poll) continue;
    next_abort_poll = now + kAbortPollIntervalNs;
    if (exchange_failed(lane)) {
      set_aborted(lane, kExchangeFailed);
      return WaitResult::aborted;
    }
    if (now - start > lane.deadline) {
      report_timeout(lane, awaited, seen);
      return WaitResult::aborted;
    }
  }
}

// [thread] Waits until the flag reaches the call's number; this thread may then read everything written
// before the flag. `end_of_stream`: the sender's end-of-stream flag, or null where a missing flag can only
// mean that the sender is late.
__device__ __forceinline__ WaitResult wait_flag(const LaneView& lane, const Flag* flag,
                                                const Flag* end_of_stream, WaitTarget awaited) {
  inject_fault(lane, KernelPoint::poll);
  if (load_acquire_sys(flag) >= awaited.call) return WaitResult::ready;
  return wait_long(lane, flag, end_of_stream, awaited);
}

// Threads of a warp, one bit each: those whose flags are all set, and those whose sender finished without
// setting them. Both empty: the call was aborted.
struct ReadyMask {
  std::uint32_t ready, finished;
};

// [thread] Whether load(flag) >= call for every flag that `wanted` names: bit i is flags[i]. False if none is
// wanted.
template <class Load>
__device__ __forceinline__ bool all_set(const Flag* flags, std::uint32_t wanted, std::uint64_t call,
                                        Load load) {
  bool set = wanted != 0;
  for (std::uint32_t left = wanted; left != 0; left &= left - 1)
    set = load(flags + __ffs(static_cast<int>(left)) - 1) >= call && set;
  return set;
}

// [warp] The threads whose wanted flags are all set. Acquire: the writers' stores before the flags happen
// before this thread's later reads, and through the ballot before the whole warp's.
__device__ __forceinline__ std::uint32_t acquire_flags(const Flag* flags, std::uint32_t wanted,
                                                       std::uint64_t call) {
  return __ballot_sync(~0u,
                       all_set(flags, wanted, call, [](const Flag* flag) { return load_acquire_sys(flag); }));
}

// [warp] The slow path of wait_any, after its first polls.
static __device__ __noinline__ ReadyMask wait_any_slow(const LaneView& lane, const Flag* flags,
                                                       std::uint32_t wanted, const Flag* end_of_stream,
                                                       WaitTarget awaited) {
  std::uint64_t start = 0, next_abort_poll = 0;
  for (unsigned poll = 1;; ++poll) {
    const bool set =
        all_set(flags, wanted, awaited.call, [](const Flag* flag) { return load_relaxed_sys(flag); });
    if (__any_sync(~0u, set)) return {acquire_flags(flags, set ? wanted : 0, awaited.call), 0};
    if (poll < kQuickPolls) continue;
    __nanosleep(100);
    if (poll % 16 != 0) continue;
    if (__any_sync(~0u, is_aborted(lane, awaited.call))) return {0, 0};
    // Acquire: every flag of the sender was set before its end-of-stream flag.
    const bool finished =
        wanted != 0 && end_of_stream != nullptr && load_acquire_sys(end_of_stream) >= awaited.call;
    if (__any_sync(~0u, finished)) {
      const std::uint32_t ready = acquire_flags(flags, finished ? wanted : 0, awaited.call);
      return {ready, __ballot_sync(~0u, finished) & ~ready};
    }
    inject_fault(lane, KernelPoint::poll);
    const std::uint64_t now = global_nanoseconds();
    if (start == 0) start = now, next_abort_poll = now + kAbortPollIntervalNs;
    if (now < next_abort_poll) continue;
    next_abort_poll = now + kAbortPollIntervalNs;
    if (exchange_failed(lane)) set_aborted(lane, kExchangeFailed);
    if (wanted != 0 && now - start > lane.deadline) report_timeout(lane, awaited, load_relaxed_sys(flags));
  }
}

// [warp] Each thread waits for the flags that its `wanted` names (bit i: flags[i]; 0: none). Returns once
// some thread has all of its own. The whole warp may then read what was written before those flags.
__device__ __forceinline__ ReadyMask wait_any(const LaneView& lane, const Flag* flags, std::uint32_t wanted,
                                              const Flag* end_of_stream, WaitTarget awaited) {
  inject_fault(lane, KernelPoint::poll);
#pragma unroll 1
  for (unsigned poll = 0; poll < kQuickPolls; ++poll) {
    const std::uint32_t ready = acquire_flags(flags, wanted, awaited.call);
    if (ready != 0) return {ready, 0};
  }
  return wait_any_slow(lane, flags, wanted, end_of_stream, awaited);
}

// [thread] Waits for an LL packet of a call header that was not there at the first poll. `word`: its payload.
static __device__ __noinline__ WaitResult wait_for_packet(const LaneView& lane, const LLPacket* packet,
                                                          WaitTarget awaited, std::uint64_t* word) {
  inject_fault(lane, KernelPoint::poll);
  const WaitResult result = wait_long(lane, packet, nullptr, awaited);
  *word = load_packet_relaxed_sys(packet).word;
  return result;
}

// [thread] Waits for a flag that another block of this call sets. False: the exchange has failed, so the
// block must not use what the flag covers. The wait has a deadline of its own: the block that sets the flag
// may never run, for example because another rank of the device takes its place.
[[nodiscard]] __device__ __forceinline__ bool wait_local_flag(const LaneView& lane, const Flag* flag,
                                                              const WaitTarget& awaited) {
#pragma unroll 1
  for (unsigned poll = 0; poll < kQuickPolls; ++poll) {
    if (load_acquire_gpu(flag) >= awaited.call) return true;
  }
  // The coordinator aborts a call, because of other ranks' headers, only after it has seen the flags of all
  // blocks. So an aborted call without the flag is a failed exchange.
  return wait_long(lane, flag, nullptr, awaited) == WaitResult::ready ||
         load_acquire_gpu(flag) >= awaited.call;
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
