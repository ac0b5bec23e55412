// A rank's link to all ranks of a group, over a bootstrap: the caller's functions, MPI, or the socket of
// `ferry launch`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/descriptors.hpp"
#include "ferry/group.hpp"

namespace ferry {

// One thread at a time. Both functions are collective and block until all ranks have called. While they wait,
// they call `check` at least every 10 ms; `check` throws to give up. After any exception the link is failed:
// it may not be used again.
class BootstrapLink {
 public:
  virtual ~BootstrapLink() = default;

  // Returns the bytes of every rank, in rank order. All ranks pass equally many.
  virtual std::vector<std::byte> all_gather(std::vector<std::byte> mine,
                                            const std::function<void()>& check) = 0;
  virtual void barrier(const std::function<void()>& check) = 0;
};

// A link over the caller's functions, which run on a thread of its own. A function that has not returned when
// the link gives up is abandoned. Throws SystemError if the thread cannot be started.
std::unique_ptr<BootstrapLink> link_by_functions(std::shared_ptr<const Bootstrap> bootstrap);

// A link over MPI, which runs on the calling thread. Throws as open_mpi().
std::unique_ptr<BootstrapLink> link_by_mpi();

// The protocol between `ferry launch` and the ranks that it starts: a rank makes a pair of connected sockets
// and sends one of them to the launcher's DescriptorSocket. Through the other it calls collectives, each with
// a FrameHead and its bytes, and receives the answer in the same form: the bytes of all ranks in turn.
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
