#include "base/os/descriptor_socket.hpp"

#include <poll.h>
#include <sys/random.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "base/system_error.hpp"

namespace ferry {

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
  message.msg_controllen = sizeof control;
  return message;
}

}  // namespace

DescriptorSocket::DescriptorSocket()
    : socket_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  if (!socket_.valid()) throw system_error("cannot create a local socket", errno);
  address_.name.sun_family = AF_UNIX;
  // Bound without a name: the system picks a free abstract address.
  address_.name_bytes = sizeof address_.name;
  auto* name = reinterpret_cast<sockaddr*>(&address_.name);
  if (bind(socket_.number(), name, sizeof address_.name.sun_family) != 0 ||
      getsockname(socket_.number(), name, &address_.name_bytes) != 0) {
    throw system_error("cannot bind a local socket", errno);
  }
  if (getrandom(address_.secret.data(), sizeof address_.secret, 0) != sizeof address_.secret) {
    throw system_error("cannot get random bytes", errno);
  }
}

bool DescriptorSocket::send(const SocketAddress& to, int from, const FileDescriptor& file) const {
  Datagram datagram{to.secret, from};
  iovec part{&datagram, sizeof datagram};
  ControlMessage control{};
  msghdr message = message_of(part, control);
  sockaddr_un name = to.name;
  message.msg_name = &name;
  message.msg_namelen = to.name_bytes;
  control.header.cmsg_level = SOL_SOCKET;
  control.header.cmsg_type = SCM_RIGHTS;
  control.header.cmsg_len = CMSG_LEN(sizeof(int));
  const int number = file.number();
  std::memcpy(CMSG_DATA(&control.header), &number, sizeof number);
  return sendmsg(socket_.number(), &message, MSG_NOSIGNAL) == sizeof datagram;
}

std::optional<DescriptorSocket::Message> DescriptorSocket::receive() const {
  while (true) {
    Datagram datagram{};
    iovec part{&datagram, sizeof datagram};
    ControlMessage control{};
    msghdr message = message_of(part, control);
    const ssize_t bytes = recvmsg(socket_.number(), &message, MSG_CMSG_CLOEXEC);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) return std::nullopt;
    FileDescriptor file;  // taken from every message, so that a stranger's file is closed again
    if (const cmsghdr* header = CMSG_FIRSTHDR(&message);
        header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(header), sizeof number);
      file = FileDescriptor(number);
    }
    if (bytes == sizeof datagram && datagram.secret == address_.secret)
      return Message{datagram.from, std::move(file)};
  }
}

void DescriptorSocket::wait(int milliseconds) const {
  pollfd entry{socket_.number(), POLLIN, 0};
  poll(&entry, 1, milliseconds);
}

}  // namespace ferry
