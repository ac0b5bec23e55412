// Tries a transport: messages between all ranks through windows with credits, compared word by word where
// they arrive. Also measures what a transport moves, with the comparison left out.
//
// A channel is a sending warp on one rank and a receiving warp on another, with a window of its own. Every
// pair of ranks has `channels` of them in each direction.
#pragma once

#include "backends/cuda/protocol/lane_memory.cuh"
#include "backends/cuda/transport/message_check.hpp"
#include "backends/cuda/transport/transport.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

// Where the messages and flags of a check lie, as addresses in this rank's own memory: transport policies
// take these.
struct CheckedMemory {
  const MessageCheck& check;

  __device__ __forceinline__ std::byte* message(int source, int channel, int slot) const {
    return at(check.layout.place(source, channel, slot) * check.layout.bytes);
  }
  __device__ __forceinline__ std::byte* staging(int peer, int channel, int slot) const {
    return at((check.layout.places() + check.layout.place(peer, channel, slot)) * check.layout.bytes);
  }
  __device__ __forceinline__ Flag* arrived(int source, int channel, int slot) const {
    return at<Flag>(check.layout.flags_begin() + 8 * check.layout.place(source, channel, slot));
  }
  __device__ __forceinline__ Flag* credit(int peer, int channel, int slot) const {
    return at<Flag>(check.layout.credits_begin() + 8 * check.layout.place(peer, channel, slot));
  }

 private:
  template <class T = std::byte>
  __device__ __forceinline__ T* at(std::int64_t offset) const {
    return memory::at<T>(check.lane, check.lane.rank, offset);
  }
};

// The words that message `message` of a channel consists of.
__device__ __forceinline__ std::uint64_t checked_word(int from, int to, int channel, std::int64_t message,
                                                      int at) {
  std::uint64_t word = static_cast<std::uint64_t>(from * kMaxDeviceRanks + to) << 40 ^
                       static_cast<std::uint64_t>(channel) << 32 ^ static_cast<std::uint64_t>(message);
  word = (word + static_cast<std::uint64_t>(at)) * 0x9e3779b97f4a7c15;
  return word ^ word >> 29;
}

// [warp] Sends the messages of a channel. False: a wait has ended without its credit.
template <class Transport>
__device__ bool send_checked(const MessageCheck& check, const Transport& transport, int peer, int channel) {
  const LaneView& lane = check.lane;
  const CheckedMemory memory{check};
  const int thread = static_cast<int>(threadIdx.x % 32), window = check.layout.window;
  const WaitTarget target{Operation::dispatch, check.call, peer};
  for (std::int64_t m = 0; m < check.messages; ++m) {
    const std::uint64_t number = check.first + static_cast<std::uint64_t>(m) + 1;
    const int slot = static_cast<int>((number - 1) % static_cast<std::uint64_t>(window));
    // A place is free once the message before in it has been read.
    const std::uint64_t read =
        number > static_cast<std::uint64_t>(window) ? number - static_cast<std::uint64_t>(window) : 0;
    const WaitResult credit = transport.wait(lane, memory.credit(peer, channel, slot), read, nullptr, target);
    if (__any_sync(~0u, credit != WaitResult::ready)) return false;
    std::byte* there = memory.message(lane.rank, channel, slot);
    const bool staged = transport.is_staged(peer);
    std::byte* composed = staged ? memory.staging(peer, channel, slot) : transport.at(lane, peer, there);
    if (check.compare || !staged) {  // a measurement sends what lies in staging
      auto* words = reinterpret_cast<ulonglong2*>(composed);
      for (int at = thread; at < check.layout.bytes / 16; at += 32) {
        words[at] = {checked_word(lane.rank, peer, channel, m, 2 * at),
                     checked_word(lane.rank, peer, channel, m, 2 * at + 1)};
      }
    }
    Flag* flag = memory.arrived(lane.rank, channel, slot);
    if (staged) {
      transport.put_with_signal(lane, peer, there, composed, check.layout.bytes, {flag, number});
    } else {
      transport.signal(lane, peer, flag, number);
    }
  }
  // Until all messages have been read: no credit arrives after the launch.
  const std::uint64_t sent = check.first + static_cast<std::uint64_t>(check.messages);
  for (std::uint64_t number =
           sent > static_cast<std::uint64_t>(window) ? sent - static_cast<std::uint64_t>(window) + 1 : 1;
       number <= sent; ++number) {
    const int slot = static_cast<int>((number - 1) % static_cast<std::uint64_t>(window));
    const WaitResult credit =
        transport.wait(lane, memory.credit(peer, channel, slot), number, nullptr, target);
    if (__any_sync(~0u, credit != WaitResult::ready)) return false;
  }
  return true;
}

// [warp] Receives the messages of a channel. False: a wait has ended without its message.
template <class Transport>
__device__ bool receive_checked(const MessageCheck& check, const Transport& transport, int peer,
                                int channel) {
  const LaneView& lane = check.lane;
  const CheckedMemory memory{check};
  const int thread = static_cast<int>(threadIdx.x % 32), window = check.layout.window;
  const WaitTarget target{Operation::dispatch, check.call, peer};
  unsigned long long wrong = 0;
  for (std::int64_t m = 0; m < check.messages; ++m) {
    const std::uint64_t number = check.first + static_cast<std::uint64_t>(m) + 1;
    const int slot = static_cast<int>((number - 1) % static_cast<std::uint64_t>(window));
    const WaitResult arrived =
        transport.wait(lane, memory.arrived(peer, channel, slot), number, nullptr, target);
    if (__any_sync(~0u, arrived != WaitResult::ready)) return false;
    if (check.compare) {
      const auto* words = reinterpret_cast<const ulonglong2*>(memory.message(peer, channel, slot));
      for (int at = thread; at < check.layout.bytes / 16; at += 32) {
        const ulonglong2 word = words[at];
        wrong += word.x != checked_word(peer, lane.rank, channel, m, 2 * at);
        wrong += word.y != checked_word(peer, lane.rank, channel, m, 2 * at + 1);
      }
    }
    // The credit also frees the sender's staging: the message has arrived, so it is no longer read there.
    transport.signal(lane, peer, memory.credit(lane.rank, channel, slot), number);
  }
  if (wrong != 0) atomicAdd(check.wrong, wrong);
  return true;
}

// [warp] The work of warp `warp` of the launch, which has check.warps(): even ones send, odd ones receive.
template <class Transport>
__device__ void check_messages(const MessageCheck& check, const Transport& transport, int warp) {
  const int channel = warp / 2 % check.layout.channels, other = warp / 2 / check.layout.channels;
  if (warp >= check.warps()) return;
  const int peer = other < check.lane.rank ? other : other + 1;
  const bool done = warp % 2 == 0 ? send_checked(check, transport, peer, channel)
                                  : receive_checked(check, transport, peer, channel);
  if (!done && threadIdx.x % 32 == 0) atomicAdd(check.ended, 1u);
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
