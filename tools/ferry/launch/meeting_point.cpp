#include "tools/ferry/launch/meeting_point.hpp"

#include <fmt/core.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/errors.hpp"
#include "group/bootstrap_link.hpp"

namespace ferry::app {

namespace {

bool made_by_this_user(const FileDescriptor& socket) {
  ucred maker{};
  socklen_t bytes = sizeof maker;
  return getsockopt(socket.number(), SOL_SOCKET, SO_PEERCRED, &maker, &bytes) == 0 && maker.uid == getuid();
}

}  // namespace

std::optional<std::size_t> MeetingPoint::Connection::announced() const {
  FrameHead head;
  if (input.size() < sizeof head) return std::nullopt;
  std::memcpy(&head, input.data(), sizeof head);
  return head.bytes;
}

bool MeetingPoint::Connection::complete() const {
  return announced() && input.size() - sizeof(FrameHead) == *announced();
}

void MeetingPoint::add_to(std::vector<pollfd>& entries) const {
  entries.push_back({newcomers_.descriptor(), POLLIN, 0});
  for (const Connection& connection : connections_) {
    const int events = connection.answer ? POLLIN | POLLOUT : POLLIN;
    if (connection.socket.valid())
      entries.push_back({connection.socket.number(), static_cast<short>(events), 0});
  }
}

void MeetingPoint::serve() {
  connect_newcomers();
  for (Connection& connection : connections_) read(connection);
  answer_if_complete();
  for (Connection& connection : connections_) send(connection);
}

void MeetingPoint::set_lost(int rank, const std::string& why) {
  if (lost_.empty()) lost_ = fmt::format("rank {} is lost: {}", rank, why);
}

void MeetingPoint::connect_newcomers() {
  for (std::size_t i = 0; i < connections_.size(); ++i) {
    auto message = newcomers_.receive();
    if (!message) return;
    if (!message->file.valid())
      throw system_error(fmt::format("cannot take the connection of rank {}", message->from), EMFILE);
    if (message->from < 0 || message->from >= std::ssize(connections_) || !made_by_this_user(message->file))
      continue;
    Connection& connection = connections_[static_cast<std::size_t>(message->from)];
    read(connection);  // a rank that has closed one may make another
    if (!connection.socket.valid()) connection.socket = std::move(message->file);
  }
}

// A rank that leaves, gives up or breaks the protocol loses the connection.
void MeetingPoint::read(Connection& connection) {
  std::byte buffer[65536];
  std::vector<std::byte>& input = connection.input;
  while (connection.socket.valid()) {
    const ssize_t bytes = recv(connection.socket.number(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0 && errno == EAGAIN) return;
    if (bytes > 0) input.insert(input.end(), buffer, buffer + bytes);
    const auto announced = connection.announced();
    const bool too_long =
        announced && (*announced > kMostFrameBytes || input.size() - sizeof(FrameHead) > *announced);
    if (bytes <= 0 || too_long) connection = {};
  }
}

void MeetingPoint::send(Connection& connection) {
  while (connection.answer) {
    const std::vector<std::byte>& all = *connection.answer;
    const ssize_t bytes = ::send(connection.socket.number(), all.data() + connection.sent,
                                 all.size() - connection.sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0 && errno == EAGAIN) return;
    if (bytes < 0) {
      connection = {};
      return;
    }
    connection.sent += static_cast<std::size_t>(bytes);
    if (connection.sent == all.size()) connection.answer = nullptr;
  }
}

void MeetingPoint::answer_if_complete() {
  const auto complete = [](const Connection& connection) { return connection.complete(); };
  if (lost_.empty() && !std::ranges::all_of(connections_, complete)) return;
  FrameHead head{.bytes = 0, .failed = lost_.empty() ? 0U : 1U};
  std::vector<std::byte> answer(sizeof head);
  const auto append = [&](const void* data, std::size_t bytes) {
    const auto* begin = static_cast<const std::byte*>(data);
    answer.insert(answer.end(), begin, begin + bytes);
  };
  append(lost_.data(), lost_.size());
  for (const Connection& connection : connections_) {
    if (lost_.empty()) append(connection.input.data() + sizeof head, *connection.announced());
  }
  head.bytes = answer.size() - sizeof head;
  std::memcpy(answer.data(), &head, sizeof head);
  const auto shared = std::make_shared<const std::vector<std::byte>>(std::move(answer));
  for (Connection& connection : connections_) {
    if (!connection.complete()) continue;
    connection.input.clear();
    connection.answer = shared;
    connection.sent = 0;
  }
}

}  // namespace ferry::app
