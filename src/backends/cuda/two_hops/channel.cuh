// Channels: how one warp passes messages to one warp of another rank, through a window of slots
// (hop_layout.hpp).
//
// Flags and credits count within a launch: their words hold its number (HopState::launch) above the count, so
// nothing is reset. When a launch begins, all windows are empty: a rank writes to them only after it has the
// headers of all ranks, and a rank posts its header after the launch before, which has read everything.
//
//   message   stored; flag (release, system scope) in signal() | acquire in look(); read
//   slot      read; credit (release) in signal()               | acquire in was_read(); written again
//
// Signals to a rank of another node may arrive in any order. No two of them are ever on their way to one
// word: each slot has a flag and a credit of its own, the slot's next flag is set after the credit has come,
// and its next credit given after that flag has. A channel's end is sent once a launch, and its reader waits
// for it. A launch ends when the messages that it has put have been read (is_closed()). So nothing of a
// launch arrives in a later one, and the outbox and send staging are free.
#pragma once

#include "backends/cuda/device/row_copy.cuh"
#include "backends/cuda/protocol/lane_memory.cuh"
#include "backends/cuda/protocol/wait.cuh"
#include "backends/cuda/transport/transport.cuh"
#include "backends/cuda/two_hops/hop_call.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

inline constexpr int kHopCountBits = 26;
inline constexpr std::uint64_t kHopCountMask = (std::uint64_t{1} << kHopCountBits) - 1;
static_assert(std::int64_t{kMaxHopNodeRanks} * SlotMetadata::kMostTokens <
              (std::int64_t{1} << kHopCountBits));

__device__ __forceinline__ std::uint64_t hop_tag(std::uint64_t number, std::int64_t count) {
  return number << kHopCountBits | static_cast<std::uint64_t>(count);
}

// [warp] Broadcasts thread 0's value. Also a barrier: all threads may then read what thread 0 has acquired.
__device__ __forceinline__ std::int32_t from_first(std::int32_t value) {
  return static_cast<std::int32_t>(__shfl_sync(~0u, value, 0));
}

// [warp] Copies whole 16-byte units. Inlined wherever it is used, it doubles the kernels, which then need
// more stack than the 1,024 bytes that a thread has by default.
static __device__ __noinline__ void copy_warp(std::byte* to, const std::byte* from, std::int64_t bytes) {
  const int end = static_cast<int>(bytes);
  copy_granules<8>(from, {0, end}, [&](const Granules<8>& granules, int at) { granules.store(to, at, end); });
}

// One rank's view of the channels of a launch.
template <class Transport>
struct HopChannels {
  const HopArguments& call;
  const Transport& transport;
  const std::uint64_t number;  // of the launch

  __device__ __forceinline__ const LaneView& lane() const { return call.wires; }
  __device__ __forceinline__ int me() const { return lane().rank; }
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x % 32); }
  __device__ __forceinline__ int slots() const { return call.layout.shape.slots; }
  template <class T = std::byte>
  __device__ __forceinline__ T* mine(std::int64_t offset) const {
    return memory::at<T>(lane(), me(), offset);
  }

  // --- writing -------------------------------------------------------------------------------------------

  // [thread] Whether the reader has read message `k` of the channel.
  __device__ __forceinline__ bool was_read(int hop, int origin, int reader, int channel,
                                           std::int32_t k) const {
    const Flag* credit = mine<Flag>(call.layout.credit(hop, origin, reader, channel, k % slots()));
    const std::uint64_t tag = hop_tag(number, k + 1);
    // Acquire: the reader has read the slot before. The transport's own acquire() is for reading what the
    // other rank has sent, and nothing of that comes with a credit.
    return load_relaxed_sys(credit) >= tag && load_acquire_sys(credit) >= tag;
  }
  // [warp] Whether message `k` of the channel may be written.
  __device__ __forceinline__ bool has_room(int hop, int origin, int reader, int channel,
                                           std::int32_t k) const {
    if (k < slots()) return true;
    bool room = false;
    if (thread() == 0) room = was_read(hop, origin, reader, channel, k - slots());
    return from_first(room ? 1 : 0) != 0;
  }

  // Where message `k` of a channel is composed: in the reader's window, or in the staging that it is put
  // from.
  __device__ __forceinline__ std::byte* compose_at(int hop, int origin, int reader, int channel,
                                                   std::int32_t k) const {
    const int slot = k % slots();
    if (transport.is_staged(reader))
      return mine(call.layout.staged(call.topology.local[origin], reader, channel, slot));
    return transport.at(lane(), reader, mine(call.layout.slot(hop, origin, channel, slot)));
  }
  // [warp] Puts `content`, in the outbox or in send staging, to `offset` in the slot of message `k`, and
  // announces the message. Nothing else of the slot is written. For a staged reader.
  __device__ __forceinline__ void put_content(int hop, int origin, int reader, int channel, std::int32_t k,
                                              std::int64_t offset, const std::byte* content,
                                              std::int64_t bytes) const {
    const int slot = k % slots();
    transport.put_with_signal(lane(), reader, mine(call.layout.slot(hop, origin, channel, slot)) + offset,
                              content, static_cast<int>(bytes),
                              mine<Flag>(call.layout.flag(hop, origin, channel, slot)),
                              hop_tag(number, k + 1));
  }
  // [warp] Announces message `k`, which has been composed, to its reader. `bytes`: size of the whole message.
  __device__ __forceinline__ void publish(int hop, int origin, int reader, int channel, std::int32_t k,
                                          std::int64_t bytes) const {
    const int slot = k % slots();
    if (transport.is_staged(reader)) {
      put_content(hop, origin, reader, channel, k, 0,
                  mine(call.layout.staged(call.topology.local[origin], reader, channel, slot)), bytes);
    } else {
      Flag* const flag = mine<Flag>(call.layout.flag(hop, origin, channel, slot));
      const std::uint64_t tag = hop_tag(number, k + 1);
      transport.signal(lane(), reader, flag, tag);
    }
  }
  // [warp] Announces that the channel has `total` messages in this launch.
  __device__ __forceinline__ void end(int hop, int origin, int reader, int channel,
                                      std::int32_t total) const {
    transport.signal(lane(), reader, mine<Flag>(call.layout.end(hop, origin, channel)),
                     hop_tag(number, total));
  }
  // [warp] Whether everything that was put into the channel has been read, so that the launch may end. For a
  // channel that has ended. Stores to mapped memory need no such wait: they arrive before a launch ends.
  __device__ __forceinline__ bool is_closed(int hop, int origin, int reader, int channel,
                                            std::int32_t total) const {
    if (!transport.is_staged(reader)) return true;
    bool read = true;
    for (std::int32_t k = max(total - slots(), 0) + thread(); k < total; k += 32)
      read = read && was_read(hop, origin, reader, channel, k);
    return __all_sync(~0u, read) != 0;
  }

  // --- reading -------------------------------------------------------------------------------------------

  enum class State { ready, late, ended };

  // [thread] Whether message `k` of the channel has arrived; the warp may read it after a barrier.
  __device__ __forceinline__ State look(int hop, int origin, int channel, std::int32_t k) const {
    const Flag* flag = mine<Flag>(call.layout.flag(hop, origin, channel, k % slots()));
    const std::uint64_t tag = hop_tag(number, k + 1);
    if (load_relaxed_sys(flag) >= tag && load_acquire_sys(flag) >= tag) {
      transport.acquire(flag, tag);
      return State::ready;
    }
    const std::uint64_t end = load_relaxed_sys(mine<Flag>(call.layout.end(hop, origin, channel)));
    const bool ended = end >> kHopCountBits == number && static_cast<std::int64_t>(end & kHopCountMask) <= k;
    return ended ? State::ended : State::late;
  }
  // [warp] look(), with the same result in all threads.
  __device__ __forceinline__ State arrived(int hop, int origin, int channel, std::int32_t k) const {
    int state = 0;
    if (thread() == 0) state = static_cast<int>(look(hop, origin, channel, k));
    return static_cast<State>(from_first(state));
  }
  __device__ __forceinline__ const std::byte* message(int hop, int origin, int channel,
                                                      std::int32_t k) const {
    return mine(call.layout.slot(hop, origin, channel, k % slots()));
  }
  // [warp] Tells `writer` that message `k` of its channel has been read: the credit for its slot.
  __device__ __forceinline__ void give_back(int hop, int origin, int writer, int channel,
                                            std::int32_t k) const {
    transport.signal(lane(), writer, mine<Flag>(call.layout.credit(hop, origin, me(), channel, k % slots())),
                     hop_tag(number, k + 1));
  }
};

}  // namespace ferry::cuda::inline FERRY_WIDTH
