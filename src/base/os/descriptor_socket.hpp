// A local socket through which ranks of one host pass open files to one another.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cstdint>
#include <optional>

#include "base/os/file_descriptor.hpp"

namespace ferry {

// Where a rank receives; plain data that ranks exchange by all_gather. Any process of the host can send to
// the socket: the secret, random bits, shows that a sender is a rank of the group.
struct SocketAddress {
  sockaddr_un name;
  socklen_t name_bytes;
  std::array<std::uint64_t, 2> secret;
};

// Unnamed in the file system, so a killed process leaves nothing behind. Never blocks.
class DescriptorSocket {
 public:
  struct Message {
    int from;
    FileDescriptor file;  // invalid: this process cannot have more files open
  };

  DescriptorSocket();  // throws SystemError

  const SocketAddress& address() const { return address_; }

  // Sends a duplicate of `file`. False: the receiver's queue is full or the receiver is gone; try again
  // later.
  bool send(const SocketAddress& to, int from, const FileDescriptor& file) const;

  // The next message of a rank, if one has arrived. Messages without the secret are dropped.
  std::optional<Message> receive() const;

  // Blocks until a message arrives, but for at most this time.
  void wait(int milliseconds) const;

 private:
  FileDescriptor socket_;
  SocketAddress address_{};
};

}  // namespace ferry
