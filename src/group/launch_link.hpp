// The protocol between `ferry launch` and the ranks that it starts: a rank makes a pair of connected sockets
// and sends one of them to the launcher's DescriptorSocket. Through the other it calls collectives, each with
// a FrameHead and its bytes, and receives the answer in the same form: the bytes of all ranks in turn.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/descriptors.hpp"

namespace ferry {

struct FrameHead {
  std::uint64_t bytes;   // that follow
  std::uint64_t failed;  // 1: the bytes are a text that says why
};

// Most bytes of one rank in one call, or of a text. Groups pass 16 kB at most.
constexpr std::size_t kMostFrameBytes = 1 << 20;

// The value of FERRY_LAUNCH.
struct LaunchedRank {
  int rank, ranks;
  SocketAddress launcher;

  std::string text() const;
  // Throws UsageError if it does not have that form.
  static LaunchedRank parse(const std::string& text);
};

}  // namespace ferry
