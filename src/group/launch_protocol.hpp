// The protocol between `ferry launch` and the ranks that it starts.
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

// The variable's value.
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
