// What `ferry launch` and the ranks that it has started say to each other.
//
// A rank finds the launcher by the environment variable FERRY_LAUNCH, "RANK/RANKS@NAME": NAME is a socket in
// the abstract namespace of this host. The rank connects to it and sends its number (int32). A collective is
// one message of every rank, a FrameHead and `bytes` bytes; when all have come, the launcher answers each
// rank with a FrameHead and the bytes of all ranks, in rank order. If that cannot happen any more, it answers
// with `failed` and a text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <sys/socket.h>
#include <sys/un.h>

namespace ferry {

struct FrameHead {
  std::uint64_t bytes;   // that follow
  std::uint64_t failed;  // 1: the bytes are a text that says why
};

// What the variable says.
struct LaunchedRank {
  int rank, ranks;
  std::string name;

  std::string text() const;
  // Throws UsageError if it does not have that form.
  static LaunchedRank parse(const std::string& text);
};

// Of a socket in the abstract namespace.
struct AbstractAddress {
  explicit AbstractAddress(const std::string& name);  // of at most 100 bytes
  const sockaddr* data() const { return reinterpret_cast<const sockaddr*>(&address_); }
  socklen_t bytes() const { return bytes_; }

 private:
  sockaddr_un address_{};
  socklen_t bytes_ = 0;
};

}  // namespace ferry
