// The arguments of the kernel that tries a transport (message_check.cuh), and where its messages lie.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cuda/protocol/lane_view.hpp"
#include "base/host_device.hpp"

namespace ferry::cuda {

// Offsets in every rank's symmetric memory:
//   messages  [R sources][channels][window]  what each rank has sent here
//   staging   [R peers][channels][window]    what this rank sends, where puts need it
//   arrived   [R sources][channels][window]  flags: the number of the message that lies there
//   credits   [R peers][channels][window]    flags: the number of the message there that the peer has read
struct MessageCheckLayout {
  std::int32_t ranks, channels, window, bytes;  // bytes: of a message, a multiple of 16

  FERRY_HD constexpr std::int64_t places() const { return std::int64_t{ranks} * channels * window; }
  FERRY_HD constexpr std::int64_t place(int rank, int channel, int slot) const {
    return (std::int64_t{rank} * channels + channel) * window + slot;
  }
  FERRY_HD constexpr std::int64_t flags_begin() const { return 2 * places() * bytes; }
  FERRY_HD constexpr std::int64_t credits_begin() const {
    return flags_begin() + places() * static_cast<std::int64_t>(sizeof(Flag));
  }
  FERRY_HD constexpr std::int64_t total() const {
    return credits_begin() + places() * static_cast<std::int64_t>(sizeof(Flag));
  }
};

// Every rank passes the same layout, numbers and `compare`.
struct MessageCheck {
  LaneView lane;  // rank, ranks, symmetric, deadline, state, report
  MessageCheckLayout layout;
  std::int64_t messages;  // of a channel, in this call
  std::uint64_t first;    // messages of a channel in earlier calls on this memory
  std::uint64_t call;     // from 1
  bool compare;
  unsigned long long* wrong;  // words that differ
  unsigned* ended;            // warps whose waits ended without what they waited for

  FERRY_HD constexpr int warps() const { return 2 * (layout.ranks - 1) * layout.channels; }
};

}  // namespace ferry::cuda
