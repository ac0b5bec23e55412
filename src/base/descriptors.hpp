// Open files: their owner, and a local socket through which processes of one host pass them to one another.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <utility>

namespace ferry {

// An open file descriptor, closed by its owner.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int number) : number_(number) {}
  ~FileDescriptor();
  FileDescriptor(FileDescriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }

  bool valid() const { return number_ >= 0; }
  int number() const { return number_; }

 private:
  int number_ = -1;
};

// Where a process receives; plain data. Anybody on the host can see the name and send to it. The secret,
// random bits that only the senders know, shows who is one of them.
struct SocketAddress {
  std::array<char, 40> name;  // in the abstract namespace, ends with a zero
  std::array<std::uint64_t, 2> secret;
};

// A socket through which processes of one host pass open files to one another.
// Unnamed in the file system, so a killed process leaves nothing behind. Never blocks.
//
// Messages of strangers cost nothing: the system drops them while they are being sent, before they take room
// in the queue or wake the receiver.
class DescriptorSocket {
 public:
  struct Message {
    int from;
    FileDescriptor file;  // invalid: this process cannot have more files open
  };

  DescriptorSocket();  // throws SystemError

  const SocketAddress& address() const { return address_; }
  int descriptor() const { return socket_.number(); }  // readable once a message has arrived

  // Sends a duplicate of `file`. Returns 0, or errno: ECONNREFUSED if the receiver is gone, others while its
  // queue is full or the system is short of something.
  int send(const SocketAddress& to, int from, const FileDescriptor& file) const;

  // The next message with the secret, if one has arrived. No file of another message is ever opened, and at
  // most one of this message.
  std::optional<Message> receive() const;

  // Blocks until a message arrives, but for at most this time.
  void wait(int milliseconds) const;

 private:
  FileDescriptor socket_;
  SocketAddress address_{};
};

}  // namespace ferry
