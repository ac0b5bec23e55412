#include "base/descriptors.hpp"

#include <arpa/inet.h>
#include <linux/filter.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "base/errors.hpp"

namespace ferry {

FileDescriptor::~FileDescriptor() {
  if (valid()) close(number_);
}

namespace {

// One datagram; the file travels beside it.
struct Datagram {
  std::array<std::uint64_t, 2> secret;  // the receiver's
  std::int32_t from;
};

// Space for one file, aligned as the system requires.
union ControlMessage {
  cmsghdr header;
  std::byte bytes[CMSG_SPACE(sizeof(int))];
};

msghdr message_of(iovec& part, ControlMessage& control) {
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = &control;
  message.msg_controllen = CMSG_LEN(sizeof(int));  // the padding after it would hold a second file
  return message;
}

struct AbstractName {
  explicit AbstractName(const SocketAddress& of)
      : bytes(static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 +
                                     strnlen(of.name.data(), of.name.size()))) {
    address.sun_family = AF_UNIX;
    // The first byte, zero, says "abstract".
    std::memcpy(address.sun_path + 1, of.name.data(), bytes - offsetof(sockaddr_un, sun_path) - 1);
  }

  sockaddr_un address{};
  socklen_t bytes;
};

// Has the system drop every datagram that does not begin with the secret. A system without such filters
// (gVisor) delivers them; then receive() drops them.
void drop_strangers(int socket, const std::array<std::uint64_t, 2>& secret) {
  std::uint32_t words[4];
  static_assert(sizeof words == sizeof secret);
  std::memcpy(words, secret.data(), sizeof words);
  sock_filter program[10];
  for (std::uint8_t i = 0; i < 4; ++i) {
    program[2 * i] = BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 4U * i);
    const auto to_the_last = static_cast<std::uint8_t>(7 - 2 * i);
    program[2 * i + 1] = BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ntohl(words[i]), 0, to_the_last);
  }
  program[8] = BPF_STMT(BPF_RET | BPF_K, 0xffffffff);
  program[9] = BPF_STMT(BPF_RET | BPF_K, 0);
  const sock_fprog filter{10, program};
  setsockopt(socket, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter);
}

}  // namespace

DescriptorSocket::DescriptorSocket()
    : socket_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  if (!socket_.valid()) throw system_error("cannot create a local socket", errno);
  std::uint64_t random[4];
  if (getrandom(random, sizeof random, 0) != sizeof random)
    throw system_error("cannot get random bytes", errno);
  address_.secret = {random[0], random[1]};
  drop_strangers(socket_.number(), address_.secret);
  // Random as well: somebody else could have taken a name that can be guessed.
  std::snprintf(address_.name.data(), address_.name.size(), "ferry-%016llx%016llx",
                static_cast<unsigned long long>(random[2]), static_cast<unsigned long long>(random[3]));
  const AbstractName name(address_);
  if (bind(socket_.number(), reinterpret_cast<const sockaddr*>(&name.address), name.bytes) != 0)
    throw system_error("cannot bind a local socket", errno);
}

int DescriptorSocket::send(const SocketAddress& to, int from, const FileDescriptor& file) const {
  Datagram datagram{to.secret, from};
  iovec part{&datagram, sizeof datagram};
  ControlMessage control{};
  msghdr message = message_of(part, control);
  AbstractName name(to);
  message.msg_name = &name.address;
  message.msg_namelen = name.bytes;
  control.header.cmsg_level = SOL_SOCKET;
  control.header.cmsg_type = SCM_RIGHTS;
  control.header.cmsg_len = CMSG_LEN(sizeof(int));
  const int number = file.number();
  std::memcpy(CMSG_DATA(&control.header), &number, sizeof number);
  return sendmsg(socket_.number(), &message, MSG_NOSIGNAL) == sizeof datagram ? 0 : errno;
}

std::optional<DescriptorSocket::Message> DescriptorSocket::receive() const {
  constexpr int kMostStrangers = 64;  // in one call
  for (int strangers = 0; strangers < kMostStrangers; ++strangers) {
    Datagram datagram{};
    // Looks at the message first, with no room for files: those of a stranger are not opened.
    const ssize_t bytes = recv(socket_.number(), &datagram, sizeof datagram, MSG_PEEK | MSG_TRUNC);
    if (bytes < 0) return std::nullopt;
    if (bytes != sizeof datagram || datagram.secret != address_.secret) {
      recv(socket_.number(), nullptr, 0, 0);
      continue;
    }
    iovec part{&datagram, sizeof datagram};
    ControlMessage control{};
    msghdr message = message_of(part, control);
    if (recvmsg(socket_.number(), &message, MSG_CMSG_CLOEXEC) != sizeof datagram) return std::nullopt;
    FileDescriptor file;
    if (const cmsghdr* header = CMSG_FIRSTHDR(&message);
        header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(header), sizeof number);
      file = FileDescriptor(number);
    }
    return Message{datagram.from, std::move(file)};
  }
  return std::nullopt;
}

void DescriptorSocket::wait(int milliseconds) const {
  pollfd entry{socket_.number(), POLLIN, 0};
  poll(&entry, 1, milliseconds);
}

}  // namespace ferry
