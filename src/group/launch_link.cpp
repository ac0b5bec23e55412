// Group::launched: a link over the socket of `ferry launch`, which has started this process.
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <utility>

#include "base/environment.hpp"
#include "base/os/file_descriptor.hpp"
#include "base/system_error.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"
#include "group/launch_protocol.hpp"
#include "group/launcher.hpp"

namespace ferry {

std::string LaunchedRank::text() const {
  return str(rank, "/", ranks, "@", name);
}

LaunchedRank LaunchedRank::parse(const std::string& text) {
  LaunchedRank read{};
  const char* const end = text.data() + text.size();
  const auto [slash, bad_rank] = std::from_chars(text.data(), end, read.rank);
  if (bad_rank == std::errc() && slash != end && *slash == '/') {
    const auto [at, bad_ranks] = std::from_chars(slash + 1, end, read.ranks);
    if (bad_ranks == std::errc() && at != end && *at == '@') read.name.assign(at + 1, end);
  }
  if (read.name.empty() || read.name.size() > 100 || read.rank < 0 || read.rank >= read.ranks)
    throw UsageError(
        str("FERRY_LAUNCH is '", text, "', which `ferry launch` does not set: expected RANK/RANKS@NAME"));
  return read;
}

AbstractAddress::AbstractAddress(const std::string& name)
    : bytes_(static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())) {
  address_.sun_family = AF_UNIX;
  std::memcpy(address_.sun_path + 1, name.data(), name.size());  // the first byte, zero, says "abstract"
}

namespace {

class LaunchLink : public BootstrapLink {
 public:
  explicit LaunchLink(const LaunchedRank& me)
      : ranks_(me.ranks), socket_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
    if (!socket_.valid()) throw system_error("cannot create a socket", errno);
    const AbstractAddress address(me.name);
    if (connect(socket_.number(), address.data(), address.bytes()) != 0)
      throw system_error("cannot reach `ferry launch`, which has started this process", errno);
    const auto rank = static_cast<std::int32_t>(me.rank);
    if (send(socket_.number(), &rank, sizeof rank, MSG_NOSIGNAL) != sizeof rank)
      throw system_error("cannot send to `ferry launch`", errno);
  }

  std::vector<std::byte> all_gather(std::vector<std::byte> mine,
                                    const std::function<void()>& check) override {
    FrameHead head{.bytes = mine.size(), .failed = 0};
    transfer(&head, sizeof head, POLLOUT, check);
    transfer(mine.data(), mine.size(), POLLOUT, check);
    transfer(&head, sizeof head, POLLIN, check);
    std::vector<std::byte> all(head.bytes);
    transfer(all.data(), all.size(), POLLIN, check);
    if (head.failed != 0)
      throw PeerLostError(std::string(reinterpret_cast<const char*>(all.data()), all.size()), {});
    if (all.size() != mine.size() * static_cast<std::size_t>(ranks_))
      throw UsageError("`ferry launch` mixed up the ranks: the process has several groups at once");
    return all;
  }

  void barrier(const std::function<void()>& check) override { all_gather({}, check); }

 private:
  // Sends (POLLOUT) or receives (POLLIN) all of the bytes.
  void transfer(void* data, std::size_t bytes, short direction, const std::function<void()>& check) {
    auto* at = static_cast<std::byte*>(data);
    while (bytes > 0) {
      const ssize_t done = direction == POLLOUT ? send(socket_.number(), at, bytes, MSG_NOSIGNAL)
                                                : recv(socket_.number(), at, bytes, 0);
      if (done > 0) {
        at += done;
        bytes -= static_cast<std::size_t>(done);
        continue;
      }
      if (done == 0)
        throw PeerLostError("`ferry launch` has ended, or a second rank of this number came", {});
      if (errno != EAGAIN && errno != EINTR)
        throw system_error("the connection to `ferry launch` failed", errno);
      pollfd entry{socket_.number(), direction, 0};
      constexpr int kCheckMilliseconds = 10;
      poll(&entry, 1, kCheckMilliseconds);
      check();
    }
  }

  int ranks_;
  FileDescriptor socket_;
};

}  // namespace

Group Group::launched() {
  const Environment environment = Environment::read();
  if (environment.launch.empty()) {
    throw UsageError(
        "Group::launched() needs `ferry launch`, which sets FERRY_LAUNCH: start the program with `ferry "
        "launch -n "
        "RANKS PROGRAM`");
  }
  const LaunchedRank me = LaunchedRank::parse(environment.launch);
  return Group(launch_custom(
      {me.rank, me.ranks, environment.host_id, [me] { return std::make_unique<LaunchLink>(me); }}, nullptr));
}

}  // namespace ferry
