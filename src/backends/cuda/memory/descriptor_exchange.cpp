#include "backends/cuda/memory/descriptor_exchange.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "base/system_error.hpp"
#include "base/text.hpp"
#include "group/rank_state.hpp"
#include "memory/collective_steps.hpp"

namespace ferry::cuda {

namespace {

using Clock = std::chrono::steady_clock;

// Between two looks at the peers; also how soon a full queue at a peer is tried again.
constexpr int kSliceMilliseconds = 10;

// Where a rank receives. Any process of the host may send there: the secret tells the ranks from the others.
struct SocketAddress {
  sockaddr_un address;
  socklen_t address_bytes;
  std::array<std::uint64_t, 2> secret;
};

// One datagram, which carries the file beside it.
struct Datagram {
  std::array<std::uint64_t, 2> secret;  // the receiver's
  std::int32_t from;
};

// Room for one file, aligned as the system wants it.
union ControlMessage {
  cmsghdr header;
  std::byte bytes[CMSG_SPACE(sizeof(int))];
};

class Exchange {
 public:
  Exchange(const Rank& rank, const Descriptor& mine)
      : rank_(rank),
        mine_(mine),
        sockets_(rank.size()),
        sent_(rank.size()),
        came_(rank.size()),
        files_(rank.size()) {}

  std::vector<Descriptor> run() {
    SocketAddress address{};
    make_on_all(rank_, [&] { address = open(); });
    rank_.all_gather(&address, sockets_.data(), sizeof address);
    // No rank closes its socket before all of them have received.
    make_on_all(rank_, [&] { carry(); });
    return std::move(files_);
  }

 private:
  SocketAddress open();
  void carry();
  void send_to(int peer);
  void receive_all();
  void take(const Datagram& datagram, Descriptor file);
  void look(Clock::time_point start);
  int missing() const;

  const Rank& rank_;
  const Descriptor& mine_;
  Descriptor socket_;
  std::vector<SocketAddress> sockets_;  // [ranks]
  std::vector<char> sent_, came_;       // [ranks]
  std::vector<Descriptor> files_;       // [ranks]
};

SocketAddress Exchange::open() {
  files_[rank_.index()] = Descriptor(fcntl(mine_.number(), F_DUPFD_CLOEXEC, 0));
  if (!files_[rank_.index()].valid()) throw system_error("cannot duplicate a file", errno);
  sent_[rank_.index()] = came_[rank_.index()] = 1;

  socket_ = Descriptor(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_.valid()) throw system_error("cannot make a local socket", errno);
  SocketAddress address{};
  address.address.sun_family = AF_UNIX;
  // An address without a name: the system picks a free one that is in no file system.
  address.address_bytes = sizeof address.address;
  auto* name = reinterpret_cast<sockaddr*>(&address.address);
  if (bind(socket_.number(), name, sizeof address.address.sun_family) != 0 ||
      getsockname(socket_.number(), name, &address.address_bytes) != 0) {
    throw system_error("cannot give a local socket its address", errno);
  }
  if (getrandom(address.secret.data(), sizeof address.secret, 0) != sizeof address.secret) {
    throw system_error("cannot get random bytes", errno);
  }
  return address;
}

void Exchange::carry() {
  for (const Clock::time_point start = Clock::now();; look(start)) {
    for (int peer = 0; peer < rank_.size(); ++peer) {
      if (!sent_[peer]) send_to(peer);
    }
    receive_all();
    if (missing() < 0) break;
    pollfd entry{socket_.number(), POLLIN, 0};
    poll(&entry, 1, kSliceMilliseconds);
  }
  for (int peer = 0; peer < rank_.size(); ++peer) {
    // The system delivers a letter without its file when the process has no room for it.
    if (!files_[peer].valid()) throw system_error(str("cannot receive the file of rank ", peer), EMFILE);
  }
}

void Exchange::send_to(int peer) {
  Datagram datagram{sockets_[peer].secret, rank_.index()};
  iovec part{&datagram, sizeof datagram};
  ControlMessage control{};
  msghdr message{};
  message.msg_name = &sockets_[peer].address;
  message.msg_namelen = sockets_[peer].address_bytes;
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = &control;
  message.msg_controllen = sizeof control;
  control.header.cmsg_level = SOL_SOCKET;
  control.header.cmsg_type = SCM_RIGHTS;
  control.header.cmsg_len = CMSG_LEN(sizeof(int));
  const int number = mine_.number();
  std::memcpy(CMSG_DATA(&control.header), &number, sizeof number);
  // What is refused is tried again: a queue is full, or the peer is dying, which look() will find.
  sent_[peer] = sendmsg(socket_.number(), &message, MSG_NOSIGNAL) == sizeof datagram;
}

void Exchange::receive_all() {
  while (true) {
    Datagram datagram{};
    iovec part{&datagram, sizeof datagram};
    ControlMessage control{};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    const ssize_t bytes = recvmsg(socket_.number(), &message, MSG_CMSG_CLOEXEC);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) return;
    Descriptor file;
    if (const cmsghdr* header = CMSG_FIRSTHDR(&message);
        header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(header), sizeof number);
      file = Descriptor(number);
    }
    if (bytes == sizeof datagram) take(datagram, std::move(file));
  }
}

void Exchange::take(const Datagram& datagram, Descriptor file) {
  const bool ours = datagram.secret == sockets_[rank_.index()].secret;
  if (!ours || datagram.from < 0 || datagram.from >= rank_.size()) return;
  came_[datagram.from] = 1;
  files_[datagram.from] = std::move(file);
}

// A rank that is still to send or to receive, or -1.
int Exchange::missing() const {
  for (int peer = 0; peer < rank_.size(); ++peer) {
    if (!sent_[peer] || !came_[peer]) return peer;
  }
  return -1;
}

void Exchange::look(Clock::time_point start) {
  RankState& state = rank_.state();
  const WaitRecord record{Operation::construct, 0, rank_.index(), missing(), 1, 0};
  if (state.look(record)) state.control().throw_failure(record);
  if (Clock::now() - start < std::chrono::duration<double>(state.deadline())) return;
  state.time_out(record, state.deadline());
  state.control().throw_failure(record);
}

}  // namespace

std::vector<Descriptor> exchange_descriptors(const Rank& rank, const Descriptor& mine) {
  return Exchange(rank, mine).run();
}

}  // namespace ferry::cuda
