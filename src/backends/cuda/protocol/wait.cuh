// How device code waits: with a deadline, with an eye on the abort word, and never for a call that has ended.
#pragma once

#include "backends/cuda/device/lane_view.hpp"
#include "backends/cuda/device/ptx.cuh"

namespace ferry::cuda {

inline constexpr std::uint64_t kFailed = ~0ull;  // LaneState::ended of an exchange that is lost

// Before what `point` names: stops until the exchange has failed, or pauses for a random time, if the lane
// asks for it. Not a function of its own: a call, even one not made, has everything around it kept in memory.
__device__ __forceinline__ void inject_fault(const LaneView& lane, Point point) {
  if (lane.fault_injection.any == 0) return;
  if (lane.fault_injection.stall == point) {
    // The host's watch sets the word. Many threads may look at it.
    while (load_relaxed_sys(&lane.report->abort) == 0) __nanosleep(500'000);
  }
  std::uint32_t random = static_cast<std::uint32_t>(clock64()) * 2654435761u + threadIdx.x * 40503u;
  random ^= random >> 15;
  random *= 2246822519u;
  random ^= random >> 13;
  if ((random & 255u) < lane.fault_injection.share)
    __nanosleep(__umulhi(random, lane.fault_injection.nanoseconds));
}

// True once `call`, or everything, has ended early on this rank. Acquire: what its ender wrote may be read.
__device__ __forceinline__ bool has_ended(const LaneView& lane, std::uint64_t call) {
  return load_acquire_gpu(&lane.state->ended) >= call;
}

struct Awaited {
  Operation operation;
  std::uint64_t call;
  int peer;
  int shift = 0;  // bits in the flag's word below the call's number
};

// The first wait to run out of time writes the record for the host; then everything of this exchange ends.
static __device__ __noinline__ void report_timeout(const LaneView& lane, Awaited awaited,
                                                   std::uint64_t seen) {
  if (atomicExch(&lane.state->timeout_taken, 1u) == 0) {
    WaitRecord* record = &lane.report->timeout;
    record->operation = awaited.operation;
    record->call = awaited.call;
    record->rank = lane.rank;
    record->peer = awaited.peer;
    record->expected = awaited.call;
    record->seen = seen;
    // Release at system scope: the host reads the record after this word.
    store_release_sys(&lane.report->timed_out, 1u);
  }
  store_release_gpu(&lane.state->ended, kFailed);
}

enum class WaitResult { yes, no, ended };  // no: its sender has sent everything else; ended: the call, early

// How often a long wait looks at host memory, which a look takes microseconds of the whole device's time to
// reach.
inline constexpr std::uint64_t kAbortPollIntervalNs = 1'000'000;

// How often a wait looks before it pauses between looks.
inline constexpr unsigned kQuickPolls = 16;

// The part of a wait after the first look.
static __device__ __noinline__ WaitResult wait_long(const LaneView& lane, const std::uint64_t* flag,
                                                    const std::uint64_t* all_sent, Awaited awaited) {
  const std::uint64_t start = global_nanoseconds();
  std::uint64_t next_host_look = start + kAbortPollIntervalNs;
  for (unsigned look = 1;; ++look) {
    // An acquire empties the multiprocessor's first cache for everybody: only when there is something to see.
    const std::uint64_t seen = load_relaxed_sys(flag) >> awaited.shift;
    // Acquire: orders what the flag's writer stored before it ahead of this thread's reads after it.
    if (seen >= awaited.call && load_acquire_sys(flag) >> awaited.shift >= awaited.call)
      return WaitResult::yes;
    if (look < kQuickPolls) continue;
    // Waiting warps share the memory system with those that move rows.
    __nanosleep(100);
    if (look % 16 != 0) continue;
    if (has_ended(lane, awaited.call)) return WaitResult::ended;
    // Acquire: the sender's flags are all older than its last word.
    if (all_sent != nullptr && load_acquire_sys(all_sent) >= awaited.call) {
      return load_acquire_sys(flag) >> awaited.shift >= awaited.call ? WaitResult::yes : WaitResult::no;
    }
    inject_fault(lane, Point::poll);
    const std::uint64_t now = global_nanoseconds();
    if (now < next_host_look) continue;
    next_host_look = now + kAbortPollIntervalNs;
    if (load_relaxed_sys(&lane.report->abort) != 0) {
      store_release_gpu(&lane.state->ended, kFailed);
      return WaitResult::ended;
    }
    if (now - start > lane.deadline) {
      report_timeout(lane, awaited, seen);
      return WaitResult::ended;
    }
  }
}

// Returns when the flag has reached the call's number, and what was written before the flag may be read by
// this thread; or when that cannot happen any more. `all_sent`: the sender's last word, or null.
__device__ __forceinline__ WaitResult wait_for(const LaneView& lane, const std::uint64_t* flag,
                                               const std::uint64_t* all_sent, Awaited awaited) {
  inject_fault(lane, Point::poll);
  if (load_acquire_sys(flag) >= awaited.call) return WaitResult::yes;
  return wait_long(lane, flag, all_sent, awaited);
}

// Threads of a warp whose flags have come, and those whose cannot come any more; neither: the call has ended
// early.
struct ReadyMask {
  std::uint32_t here, late;
};
// Whether all that `wanted` names (one bit each) of the flags from `flags` on have come, by load(flag).
template <class Load>
__device__ __forceinline__ bool all_here(const std::uint64_t* flags, std::uint32_t wanted, std::uint64_t call,
                                         Load load) {
  bool here = wanted != 0;
  for (std::uint32_t left = wanted; left != 0; left &= left - 1)
    here = load(flags + __ffs(static_cast<int>(left)) - 1) >= call && here;
  return here;
}
// Acquire: orders what the flags' writers stored before them ahead of this thread's reads after them; and by
// the exchange of the result ahead of the warp's.
__device__ __forceinline__ std::uint32_t acquire_all(const std::uint64_t* flags, std::uint32_t wanted,
                                                     std::uint64_t call) {
  return __ballot_sync(
      ~0u, all_here(flags, wanted, call, [](const std::uint64_t* flag) { return load_acquire_sys(flag); }));
}

// The part of it after the first look.
static __device__ __noinline__ ReadyMask wait_long_for_some(const LaneView& lane, const std::uint64_t* flags,
                                                            std::uint32_t wanted,
                                                            const std::uint64_t* all_sent, Awaited awaited) {
  std::uint64_t start = 0, next_host_look = 0;
  for (unsigned look = 1;; ++look) {
    const bool seen = all_here(flags, wanted, awaited.call,
                               [](const std::uint64_t* flag) { return load_relaxed_sys(flag); });
    if (__any_sync(~0u, seen)) return {acquire_all(flags, seen ? wanted : 0, awaited.call), 0};
    if (look < kQuickPolls) continue;
    __nanosleep(100);
    if (look % 16 != 0) continue;
    if (__any_sync(~0u, has_ended(lane, awaited.call))) return {0, 0};
    // Acquire: the sender's flags are all older than its last word.
    const bool last = wanted != 0 && all_sent != nullptr && load_acquire_sys(all_sent) >= awaited.call;
    if (__any_sync(~0u, last)) {
      const std::uint32_t here = acquire_all(flags, last ? wanted : 0, awaited.call);
      return {here, __ballot_sync(~0u, last) & ~here};
    }
    inject_fault(lane, Point::poll);
    const std::uint64_t now = global_nanoseconds();
    if (start == 0) start = now, next_host_look = now + kAbortPollIntervalNs;
    if (now < next_host_look) continue;
    next_host_look = now + kAbortPollIntervalNs;
    if (load_relaxed_sys(&lane.report->abort) != 0) store_release_gpu(&lane.state->ended, kFailed);
    if (wanted != 0 && now - start > lane.deadline) report_timeout(lane, awaited, load_relaxed_sys(flags));
  }
}
// By a whole warp, each thread that waits for `wanted` (one bit each) of the flags from `flags` on: returns
// when some thread has all of its own. What was written before them may be read by all threads.
__device__ __forceinline__ ReadyMask wait_for_some(const LaneView& lane, const std::uint64_t* flags,
                                                   std::uint32_t wanted, const std::uint64_t* all_sent,
                                                   Awaited awaited) {
  inject_fault(lane, Point::poll);
#pragma unroll 1
  for (unsigned look = 0; look < kQuickPolls; ++look) {
    const std::uint32_t here = acquire_all(flags, wanted, awaited.call);
    if (here != 0) return {here, 0};
  }
  return wait_long_for_some(lane, flags, wanted, all_sent, awaited);
}

// The same for a unit of a letter that has not been here at the first look: its word.
static __device__ __noinline__ WaitResult wait_for_unit(const LaneView& lane, const LLPacket* unit,
                                                        Awaited awaited, std::uint64_t* word) {
  inject_fault(lane, Point::poll);
  const WaitResult came = wait_long(lane, &unit->call, nullptr, awaited);
  *word = load_packet_relaxed_sys(unit).word;
  return came;
}

// By one whole warp, for one flag: its first thread waits. What was written before the flag may be read by
// all of them: its acquire is ordered before their reads by the exchange of the result.
__device__ __forceinline__ WaitResult wait_together(const LaneView& lane, const std::uint64_t* flag,
                                                    const std::uint64_t* all_sent, Awaited awaited) {
  int came = 0;
  if (threadIdx.x % 32 == 0) came = static_cast<int>(wait_for(lane, flag, all_sent, awaited));
  __syncwarp();
  return static_cast<WaitResult>(__shfl_sync(~0u, came, 0));
}

// For a flag of this rank's own device. Its setter has a deadline of its own and ends the call when it fails.
__device__ __forceinline__ bool wait_here(const LaneView& lane, const std::uint64_t* flag,
                                          std::uint64_t call) {
  for (unsigned look = 1;; ++look) {
    if (load_acquire_gpu(flag) >= call) return true;
    if (look % 16 == 0 && has_ended(lane, call)) return false;
  }
}

}  // namespace ferry::cuda
