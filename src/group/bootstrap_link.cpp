#include "group/bootstrap_link.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdio>
#include <utility>

#include "base/callback_thread.hpp"
#include "base/environment.hpp"
#include "base/errors.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"
#include "group/launcher.hpp"
#include "group/mpi_library.hpp"

namespace ferry {
namespace {

// Memory of one gather. The transport owns it too, and may still use it after the link has given up.
struct Buffers {
  Buffers(std::vector<std::byte> given, int ranks)
      : mine(std::move(given)), all(mine.size() * static_cast<std::size_t>(ranks)) {}

  std::vector<std::byte> mine, all;
};

class FunctionLink : public BootstrapLink {
 public:
  explicit FunctionLink(std::shared_ptr<const Bootstrap> bootstrap) : bootstrap_(std::move(bootstrap)) {}

  std::vector<std::byte> all_gather(std::vector<std::byte> mine,
                                    const std::function<void()>& check) override {
    const auto buffers = std::make_shared<Buffers>(std::move(mine), bootstrap_->ranks);
    thread_.run(
        "Bootstrap::all_gather",
        [bootstrap = bootstrap_, buffers] {
          bootstrap->all_gather(buffers->mine.data(), buffers->all.data(), buffers->mine.size());
        },
        check);
    return std::move(buffers->all);
  }

  void barrier(const std::function<void()>& check) override {
    thread_.run("Bootstrap::barrier", [bootstrap = bootstrap_] { bootstrap->barrier(); }, check);
  }

 private:
  std::shared_ptr<const Bootstrap> bootstrap_;  // shared with abandoned calls
  CallbackThread thread_;
};

class MpiLink : public BootstrapLink {
 public:
  MpiLink() { open_mpi(); }

  std::vector<std::byte> all_gather(std::vector<std::byte> mine,
                                    const std::function<void()>& check) override {
    const auto buffers = std::make_shared<Buffers>(std::move(mine), open_mpi().ranks);
    const auto start = [&](ferry_mpi_operation** operation, char* message) {
      return open_mpi().start_all_gather(buffers->mine.data(), buffers->all.data(), buffers->mine.size(),
                                         operation, message);
    };
    try {
      run_mpi_operation(start, check);
    } catch (...) {
      keep_forever(buffers);
      throw;
    }
    return std::move(buffers->all);
  }

  void barrier(const std::function<void()>& check) override { all_gather({}, check); }
};

}  // namespace

std::unique_ptr<BootstrapLink> link_by_functions(std::shared_ptr<const Bootstrap> bootstrap) {
  return std::make_unique<FunctionLink>(std::move(bootstrap));
}

std::unique_ptr<BootstrapLink> link_by_mpi() {
  return std::make_unique<MpiLink>();
}

std::string LaunchedRank::text() const {
  char secret[33];
  std::snprintf(secret, sizeof secret, "%016llx%016llx", static_cast<unsigned long long>(launcher.secret[0]),
                static_cast<unsigned long long>(launcher.secret[1]));
  return str(rank, "/", ranks, "@", launcher.name.data(), ":", secret);
}

LaunchedRank LaunchedRank::parse(const std::string& text) {
  LaunchedRank read{};
  int end = 0;
  unsigned long long secret[2];
  // The sizes of the name and of the secret's halves are those that text() writes.
  const int fields = std::sscanf(text.c_str(), "%9d/%9d@%38[a-z0-9-]:%16llx%16llx%n", &read.rank, &read.ranks,
                                 read.launcher.name.data(), &secret[0], &secret[1], &end);
  if (fields != 5 || static_cast<std::size_t>(end) != text.size() || read.rank < 0 || read.rank >= read.ranks)
    throw UsageError(str("FERRY_LAUNCH is '", text,
                         "', which `ferry launch` does not set: expected RANK/RANKS@NAME:SECRET"));
  read.launcher.secret = {secret[0], secret[1]};
  return read;
}

namespace {

// Over the socket of `ferry launch`, which has started this process.
class LaunchLink : public BootstrapLink {
 public:
  explicit LaunchLink(const LaunchedRank& me) : me_(me) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0)
      throw system_error("cannot create a pair of sockets", errno);
    socket_ = FileDescriptor(ends[0]);
    launchers_end_ = FileDescriptor(ends[1]);
  }

  std::vector<std::byte> all_gather(std::vector<std::byte> mine,
                                    const std::function<void()>& check) override {
    if (launchers_end_.valid()) connect(check);
    FrameHead head{.bytes = mine.size(), .failed = 0};
    transfer(&head, sizeof head, POLLOUT, check);
    transfer(mine.data(), mine.size(), POLLOUT, check);
    transfer(&head, sizeof head, POLLIN, check);
    const std::size_t expected = mine.size() * static_cast<std::size_t>(me_.ranks);
    if (head.failed != 0 ? head.bytes > kMostFrameBytes : head.bytes != expected)
      throw UsageError("`ferry launch` mixed up the ranks: the process has several groups at once");
    std::vector<std::byte> all(head.bytes);
    transfer(all.data(), all.size(), POLLIN, check);
    if (head.failed != 0)
      throw PeerLostError(std::string(reinterpret_cast<const char*>(all.data()), all.size()), {});
    return all;
  }

  void barrier(const std::function<void()>& check) override { all_gather({}, check); }

 private:
  // Gives the launcher its end, once its queue has room.
  void connect(const std::function<void()>& check) {
    const DescriptorSocket sender;
    while (const int error = sender.send(me_.launcher, me_.rank, launchers_end_)) {
      if (error == ECONNREFUSED)
        throw system_error("cannot reach `ferry launch`, which has started this process", error);
      sender.wait(kCheckMilliseconds);
      check();
    }
    launchers_end_ = FileDescriptor();
  }

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
      if (done == 0 || errno == EPIPE || errno == ECONNRESET)
        throw PeerLostError("`ferry launch` has ended, or a second rank of this number came", {});
      if (errno != EAGAIN && errno != EINTR)
        throw system_error("the connection to `ferry launch` failed", errno);
      pollfd entry{socket_.number(), direction, 0};
      poll(&entry, 1, kCheckMilliseconds);
      check();
    }
  }

  static constexpr int kCheckMilliseconds = 10;

  LaunchedRank me_;
  FileDescriptor socket_, launchers_end_;
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
