#include "tools/ferry/launch/meeting_point.hpp"

#include <fmt/core.h>
#include <sys/random.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/system_error.hpp"
#include "group/launch_protocol.hpp"

namespace ferry::app {

// Connection of a process that claims to be a rank. `input`: bytes received from it and not answered yet.
struct MeetingPoint::Connection {
  FileDescriptor socket;
  int rank = -1;  // -1: it has not said so yet
  std::vector<std::byte> input{};

  // The bytes of its part in the pending collective, if they are all there.
  std::optional<std::size_t> complete() const {
    FrameHead head;
    if (rank < 0 || input.size() < sizeof head) return std::nullopt;
    std::memcpy(&head, input.data(), sizeof head);
    if (input.size() < sizeof head + head.bytes) return std::nullopt;
    return head.bytes;
  }
};

MeetingPoint::MeetingPoint(int ranks)
    : ranks_(ranks), listener_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  std::uint64_t secret = 0;
  if (getrandom(&secret, sizeof secret, 0) != sizeof secret) throw system_error("cannot draw a name", errno);
  name_ = fmt::format("ferry-launch-{}-{:016x}", getpid(), secret);
  const AbstractAddress address(name_);
  if (!listener_.valid() || bind(listener_.number(), address.data(), address.bytes()) != 0 ||
      listen(listener_.number(), ranks) != 0)
    throw system_error("cannot listen on a local socket", errno);
}

MeetingPoint::~MeetingPoint() = default;

void MeetingPoint::add_to(std::vector<pollfd>& entries) const {
  entries.push_back({listener_.number(), POLLIN, 0});
  for (const auto& connection : connections_) entries.push_back({connection->socket.number(), POLLIN, 0});
}

void MeetingPoint::serve() {
  accept_all();
  for (const auto& connection : connections_) read(*connection);
  std::erase_if(connections_, [](const auto& connection) { return !connection->socket.valid(); });
  answer_if_complete();
}

void MeetingPoint::set_lost(int rank, const std::string& why) {
  if (lost_.empty()) lost_ = fmt::format("rank {} is lost: {}", rank, why);
}

// Only processes of this user may take part.
void MeetingPoint::accept_all() {
  while (true) {
    FileDescriptor socket(accept4(listener_.number(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) return;
    ucred sender{};
    socklen_t bytes = sizeof sender;
    if (getsockopt(socket.number(), SOL_SOCKET, SO_PEERCRED, &sender, &bytes) != 0 || sender.uid != getuid())
      continue;
    connections_.push_back(std::make_unique<Connection>(Connection{std::move(socket)}));
  }
}

void MeetingPoint::read(Connection& connection) {
  std::byte buffer[65536];
  while (true) {
    const ssize_t bytes = recv(connection.socket.number(), buffer, sizeof buffer, 0);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0 && errno == EAGAIN) break;
    if (bytes <= 0) {  // the rank has left, or gave up
      connection.socket = FileDescriptor();
      return;
    }
    connection.input.insert(connection.input.end(), buffer, buffer + bytes);
  }
  std::int32_t rank = 0;
  if (connection.rank >= 0 || connection.input.size() < sizeof rank) return;
  std::memcpy(&rank, connection.input.data(), sizeof rank);
  connection.input.erase(connection.input.begin(), connection.input.begin() + sizeof rank);
  const bool taken = std::any_of(connections_.begin(), connections_.end(), [rank](const auto& other) {
    return other->socket.valid() && other->rank == rank;
  });
  if (rank < 0 || rank >= ranks_ || taken) {
    connection.socket = FileDescriptor();
  } else {
    connection.rank = rank;
  }
}

void MeetingPoint::answer_if_complete() {
  std::vector<Connection*> by_rank(static_cast<std::size_t>(ranks_));
  for (const auto& connection : connections_) {
    if (connection->complete()) by_rank[static_cast<std::size_t>(connection->rank)] = connection.get();
  }
  if (!lost_.empty()) {
    for (Connection* connection : by_rank) {
      if (connection != nullptr) send_to(*connection, true, lost_.data(), lost_.size());
    }
    return;
  }
  if (std::any_of(by_rank.begin(), by_rank.end(), [](const Connection* c) { return c == nullptr; })) return;
  std::vector<std::byte> all;
  for (const Connection* connection : by_rank) {
    const auto begin = connection->input.begin() + sizeof(FrameHead);
    all.insert(all.end(), begin, begin + static_cast<std::ptrdiff_t>(*connection->complete()));
  }
  for (Connection* connection : by_rank) send_to(*connection, false, all.data(), all.size());
}

// Answers the connection's pending call. A rank that does not read its answer loses the connection.
void MeetingPoint::send_to(Connection& connection, bool failed, const void* data, std::size_t bytes) {
  const auto used = static_cast<std::ptrdiff_t>(sizeof(FrameHead) + *connection.complete());
  connection.input.erase(connection.input.begin(), connection.input.begin() + used);
  const FrameHead head{.bytes = bytes, .failed = failed ? 1U : 0U};
  std::vector<std::byte> message(sizeof head + bytes);
  std::memcpy(message.data(), &head, sizeof head);
  if (bytes > 0) std::memcpy(message.data() + sizeof head, data, bytes);
  std::size_t sent = 0;
  while (sent < message.size()) {
    const ssize_t done =
        send(connection.socket.number(), message.data() + sent, message.size() - sent, MSG_NOSIGNAL);
    if (done > 0) {
      sent += static_cast<std::size_t>(done);
      continue;
    }
    pollfd entry{connection.socket.number(), POLLOUT, 0};
    constexpr int kPatienceMilliseconds = 1000;
    if (errno == EINTR || (errno == EAGAIN && poll(&entry, 1, kPatienceMilliseconds) > 0)) continue;
    connection.socket = FileDescriptor();
    return;
  }
}

}  // namespace ferry::app
