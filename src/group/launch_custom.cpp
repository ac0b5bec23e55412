// Group::custom and Group::mpi: ranks that meet through a bootstrap of the caller, then share a control
// block.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/os/descriptor_socket.hpp"
#include "base/os/published_handle.hpp"
#include "base/system_error.hpp"
#include "base/text.hpp"
#include "group/launcher.hpp"

namespace ferry {

namespace {

// What each rank sends to the others through the bootstrap, before they share memory.
struct Introduction {
  int rank = -1;
  int process = 0;
  SocketAddress socket = {};              // where the rank receives the file of the control block
  const ControlBlock* control = nullptr;  // rank 0: its own view of the control block
  int error_number = 0;                   // errno if the rank could not create its socket or the block
  std::uint64_t pid_namespace = 0;        // process numbers mean nothing in another namespace
  std::uint64_t network_namespace = 0;    // sockets of another namespace cannot be reached
  char boot_id[40] = {};                  // of the running kernel: identifies the host
  char host_name[64] = {};                // for messages
};

// Rank 0's control block, kept open until every rank has attached to it.
struct PublishedControlBlock {
  FileDescriptor memory;
  std::optional<PublishedHandle<ControlBlock>> handle;
};

// `path` names a namespace of this process, such as /proc/self/ns/pid.
std::uint64_t namespace_number(const char* path) {
  struct stat status{};
  return stat(path, &status) == 0 ? status.st_ino : 0;
}

Introduction introduce(int rank) {
  Introduction mine;
  mine.rank = rank;
  mine.process = getpid();
  mine.pid_namespace = namespace_number("/proc/self/ns/pid");
  mine.network_namespace = namespace_number("/proc/self/ns/net");
  std::ifstream("/proc/sys/kernel/random/boot_id").get(mine.boot_id, sizeof mine.boot_id);
  gethostname(mine.host_name, sizeof mine.host_name - 1);
  return mine;
}

void require_one_host(const std::vector<Introduction>& introductions) {
  std::set<std::string> hosts;
  bool one_host = true;
  for (const Introduction& rank : introductions) {
    one_host &= std::strcmp(rank.boot_id, introductions[0].boot_id) == 0 &&
                rank.pid_namespace == introductions[0].pid_namespace &&
                rank.network_namespace == introductions[0].network_namespace;
    hosts.insert(rank.host_name);
  }
  if (one_host) return;
  std::string names;
  for (const std::string& host : hosts) names += (names.empty() ? "" : ", ") + host;
  throw UnsupportedError(
      str("the ranks of a group must share one host, one process namespace and one network namespace; these "
          "run on: ",
          names));
}

constexpr int kRetryMs = 10;

using Clock = std::chrono::steady_clock;

// Also true for a process that has ended and is not reaped yet.
bool has_ended(int process) {
  const FileDescriptor descriptor(static_cast<int>(syscall(SYS_pidfd_open, process, 0)));
  if (!descriptor.valid()) return errno == ESRCH;
  pollfd entry{descriptor.number(), POLLIN, 0};
  return poll(&entry, 1, 0) > 0;
}

class CustomLauncher : public Group::Launcher {
 public:
  CustomLauncher(Bootstrap bootstrap, std::shared_ptr<Engine> engine)
      : Launcher(Topology::blocks(bootstrap.ranks, 1), std::move(engine)), bootstrap_(std::move(bootstrap)) {}

  void run(const std::function<void(Rank)>& body) override { run_rank(rendezvous(), bootstrap_.rank, body); }
  Rank join() override { return join_as(rendezvous(), bootstrap_.rank); }

 private:
  // Collective. Rank 0 creates the control block, the others attach to it. Every rank throws if one fails.
  std::shared_ptr<ControlBlock> rendezvous() const {
    Introduction mine = introduce(bootstrap_.rank);
    std::optional<DescriptorSocket> socket;
    try {
      mine.socket = socket.emplace().address();
    } catch (const SystemError& refused) {
      mine.error_number = refused.error_number;
    }
    PublishedControlBlock published;  // on rank 0, until the barrier below
    if (bootstrap_.rank == 0) create_control_block(published, mine);
    const std::vector<Introduction> introductions = gather_introductions(mine);
    require_one_host(introductions);
    for (const Introduction& rank : introductions) {
      if (rank.error_number == 0) continue;
      throw system_error(
          str("rank ", rank.rank, " cannot make the group's shared memory or a socket to share it"),
          rank.error_number);
    }

    std::shared_ptr<ControlBlock> control;
    int error = 0;
    try {
      if (bootstrap_.rank == 0) send_control_block(*socket, published.memory, introductions);
      control = attach(*socket, introductions[0]);
    } catch (const SystemError& refused) {
      error = refused.error_number;
    }
    std::vector<int> errors(ranks());
    bootstrap_.all_gather(&error, errors.data(), sizeof error);
    for (int rank = 0; rank < ranks(); ++rank) {
      if (errors[rank] != 0)
        throw system_error(str("rank ", rank, " cannot open the group's shared memory"), errors[rank]);
    }
    bootstrap_.barrier();
    return control;
  }

  std::vector<Introduction> gather_introductions(const Introduction& mine) const {
    std::vector<Introduction> introductions(ranks());
    bootstrap_.all_gather(&mine, introductions.data(), sizeof mine);
    for (int rank = 0; rank < ranks(); ++rank) {
      if (introductions[rank].rank == rank) continue;
      throw UsageError(str("Bootstrap::all_gather returned the data of rank ", introductions[rank].rank,
                           " at the index of rank ", rank));
    }
    return introductions;
  }

  void create_control_block(PublishedControlBlock& published, Introduction& mine) const {
    published.memory = FileDescriptor(memfd_create("ferry", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    // Sealed: no rank can truncate the file under the mappings of the others.
    if (!published.memory.valid() ||
        ftruncate(published.memory.number(), ControlBlock::bytes(ranks())) != 0 ||
        fcntl(published.memory.number(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
      mine.error_number = errno;
      return;
    }
    try {
      published.handle.emplace(map_control_block(published.memory));
    } catch (const SystemError& refused) {
      mine.error_number = refused.error_number;
      return;
    }
    mine.control = published.handle->address();
  }

  std::shared_ptr<ControlBlock> map_control_block(const FileDescriptor& memory) const {
    return std::make_shared<ControlBlock>(Mapping::file(memory.number(), ControlBlock::bytes(ranks())),
                                          ranks());
  }

  // Rank 0: sends the control block's file to the ranks of other processes. A rank that has died is skipped,
  // so that the others do not wait for the file in vain. The deadline is for all ranks together.
  void send_control_block(const DescriptorSocket& socket, const FileDescriptor& memory,
                          const std::vector<Introduction>& introductions) const {
    const Clock::time_point start = Clock::now();
    int dead = -1;
    for (const Introduction& rank : introductions) {
      if (rank.process == getpid()) continue;
      // A send fails while the receiver's queue is full.
      while (!socket.send(rank.socket, 0, memory)) {
        if (has_ended(rank.process)) {
          dead = rank.rank;
          break;
        }
        require_in_time(start, rank.rank, "takes the file of the group's shared memory");
        socket.wait(kRetryMs);
      }
    }
    if (dead >= 0) throw system_error(str("rank ", dead, " has ended"), ESRCH);
  }

  FileDescriptor receive_control_block(const DescriptorSocket& socket, const Introduction& owner) const {
    const Clock::time_point start = Clock::now();
    while (true) {
      if (auto message = socket.receive()) {
        if (message->file.valid()) return std::move(message->file);
        throw system_error("cannot have more files open", EMFILE);
      }
      if (has_ended(owner.process)) throw system_error("rank 0 has ended", ESRCH);
      require_in_time(start, owner.rank, "sends the file of the group's shared memory");
      socket.wait(kRetryMs);
    }
  }

  // Throws TimeoutError after the group's deadline. Unlike other errors it is not told to the peers through
  // the bootstrap: a rank that is late here would be late there too.
  void require_in_time(Clock::time_point start, int peer, const char* step) const {
    if (std::chrono::duration<double>(Clock::now() - start).count() < deadline()) return;
    throw TimeoutError(str("rank ", bootstrap_.rank, " waited ", deadline(), " s until rank ", peer, " ",
                           step, ": is its process stopped? Group::set_deadline() allows more time"),
                       {.operation = Operation::construct, .rank = bootstrap_.rank, .peer = peer});
  }

  // Threads of rank 0's process use its mapping, because the thread sanitizer tracks addresses, not pages.
  std::shared_ptr<ControlBlock> attach(const DescriptorSocket& socket, const Introduction& owner) const {
    auto control = owner.process == getpid() ? PublishedHandle<ControlBlock>::take(owner.control)
                                             : map_control_block(receive_control_block(socket, owner));
    if (!control) throw system_error("rank 0 no longer offers the control block", ESRCH);
    control->join(bootstrap_.rank);  // so that peers notice if this process dies from here on
    return control;
  }

  Bootstrap bootstrap_;
};

}  // namespace

std::shared_ptr<Group::Launcher> launch_custom(Bootstrap bootstrap, std::shared_ptr<Engine> engine) {
  return std::make_shared<CustomLauncher>(std::move(bootstrap), std::move(engine));
}

}  // namespace ferry
