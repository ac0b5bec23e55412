#include "group/rendezvous.hpp"

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
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/descriptors.hpp"
#include "base/errors.hpp"
#include "base/published_handle.hpp"
#include "base/text.hpp"
#include "group/liveness.hpp"
#include "group/waiter.hpp"

namespace ferry {
namespace {

// `path` names a namespace of this process, such as /proc/self/ns/pid.
std::uint64_t namespace_number(const char* path) {
  struct stat status{};
  return stat(path, &status) == 0 ? status.st_ino : 0;
}

// FNV-1a, so that hosts with different builds of Ferry agree. Never 0 for a text.
std::uint64_t hash_of(const std::string& text) {
  if (text.empty()) return 0;
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash | 1;
}

}  // namespace

HostIdentity HostIdentity::of_this_process(const std::string& host_id) {
  HostIdentity identity;
  identity.pid_namespace = namespace_number("/proc/self/ns/pid");
  identity.ipc_namespace = namespace_number("/proc/self/ns/ipc");
  identity.network_namespace = namespace_number("/proc/self/ns/net");
  identity.simulated = hash_of(host_id);
  std::ifstream("/proc/sys/kernel/random/boot_id").get(identity.boot_id, sizeof identity.boot_id);
  return identity;
}

namespace {

// Each rank's first message, about itself.
struct Introduction {
  int rank = -1;
  int process = 0;
  HostIdentity host;
  SocketAddress socket = {};  // where the rank receives the file of its host's control block
  int error_number = 0;       // errno if the rank could not create its socket
  char host_name[64] = {};    // for messages
};

// The second message: how to reach a host's control block, from the host's first rank, which has made it.
// Empty from all other ranks.
struct ControlBlockAddress {
  const ControlBlock* control = nullptr;  // its own view, for threads of its process
  int error_number = 0;                   // errno if it could not make the block
};

// A control block, kept open by its maker until every rank of the host has attached to it.
struct PublishedControlBlock {
  FileDescriptor memory;
  std::optional<PublishedHandle<ControlBlock>> handle;
};

constexpr int kRetryMs = 10;

class Rendezvous {
 public:
  Rendezvous(BootstrapLink& link, int rank, int ranks, double deadline)
      : link_(link), rank_(rank), ranks_(ranks), deadline_(deadline) {}

  Meeting run(const std::string& host_id) {
    Introduction mine{.rank = rank_, .process = getpid(), .host = HostIdentity::of_this_process(host_id)};
    gethostname(mine.host_name, sizeof mine.host_name - 1);
    std::optional<DescriptorSocket> socket;
    try {
      mine.socket = socket.emplace().address();
    } catch (const SystemError& refused) {
      mine.error_number = refused.error_number;
    }
    introductions_ = gather(mine);
    for (int rank = 0; rank < ranks_; ++rank) {
      const Introduction& peer = introductions_[rank];
      if (peer.rank != rank) {
        throw UsageError(str("Bootstrap::all_gather returned the data of rank ", peer.rank,
                             " at the index of rank ", rank));
      }
      if (peer.error_number != 0)
        throw system_error(str("rank ", rank, " cannot make a socket to share memory"), peer.error_number);
    }

    Topology topology = discover_nodes();
    const std::vector<int>& local_ranks = topology.ranks_of(topology.node_of(rank_));
    const int owner = local_ranks[0];
    PublishedControlBlock published;  // on the owner, until the barrier below
    const std::vector<ControlBlockAddress> addresses =
        gather(rank_ == owner ? make_control_block(published) : ControlBlockAddress{});
    for (int rank = 0; rank < ranks_; ++rank) {
      if (addresses[rank].error_number != 0)
        throw system_error(str("rank ", rank, " cannot make the group's shared memory"),
                           addresses[rank].error_number);
    }

    std::shared_ptr<ControlBlock> control;
    int error = 0;
    try {
      if (rank_ == owner) send_control_block(*socket, published.memory, local_ranks);
      control = attach(*socket, introductions_[owner], addresses[owner]);
    } catch (const SystemError& refused) {
      error = refused.error_number;
    }
    require_all_attached(error, topology);
    const WaitLimit limit{.seconds = deadline_};
    link_.barrier([&] { require_in_time(limit, -1, "for Bootstrap::barrier to return"); });
    return {std::move(control), std::move(topology)};
  }

 private:
  // Collective, over the link.
  template <class T>
  std::vector<T> gather(const T& mine) const {
    std::vector<std::byte> bytes(sizeof mine);
    std::memcpy(bytes.data(), &mine, sizeof mine);
    const WaitLimit limit{.seconds = deadline_};
    const std::vector<std::byte> gathered = link_.all_gather(std::move(bytes), [&] {
      require_in_time(limit, -1, "for Bootstrap::all_gather to return: has every rank joined?");
    });
    std::vector<T> all(static_cast<std::size_t>(ranks_));
    std::memcpy(static_cast<void*>(all.data()), gathered.data(), sizeof mine * all.size());
    return all;
  }

  Topology discover_nodes() const {
    std::map<HostIdentity, int> labels;
    std::vector<int> node_of;
    bool simulated = false;
    for (const Introduction& rank : introductions_) {
      node_of.push_back(labels.try_emplace(rank.host, static_cast<int>(labels.size())).first->second);
      simulated |= rank.host.simulated != 0;
    }
    return Topology(node_of, simulated);
  }

  ControlBlockAddress make_control_block(PublishedControlBlock& published) const {
    published.memory = FileDescriptor(memfd_create("ferry", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    // Sealed: no rank can truncate the file under the mappings of the others.
    if (!published.memory.valid() || ftruncate(published.memory.number(), ControlBlock::bytes(ranks_)) != 0 ||
        fcntl(published.memory.number(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
      return {.error_number = errno};
    }
    try {
      published.handle.emplace(map_control_block(published.memory));
    } catch (const SystemError& refused) {
      return {.error_number = refused.error_number};
    }
    return {.control = published.handle->address()};
  }

  std::shared_ptr<ControlBlock> map_control_block(const FileDescriptor& memory) const {
    return std::make_shared<ControlBlock>(Mapping::file(memory.number(), ControlBlock::bytes(ranks_)),
                                          ranks_);
  }

  // Sends the control block's file to the ranks of other processes. A rank that has ended, or is not on this
  // host, is skipped, so that the others do not wait for the file in vain. The deadline is for all ranks
  // together.
  void send_control_block(const DescriptorSocket& socket, const FileDescriptor& memory,
                          const std::vector<int>& local_ranks) const {
    const WaitLimit limit{.seconds = deadline_};
    int missing = -1;
    for (const int rank : local_ranks) {
      const Introduction& to = introductions_[rank];
      if (to.process == getpid()) continue;
      // A send fails while the receiver's queue is full.
      while (socket.send(to.socket, rank_, memory) != 0) {
        if (has_ended(to.process)) {
          missing = rank;
          break;
        }
        require_in_time(limit, rank,
                        str("until rank ", rank, " takes the file of the group's shared memory"));
        socket.wait(kRetryMs);
      }
    }
    if (missing >= 0) throw system_error(str("rank ", missing, " is not running"), ESRCH);
  }

  FileDescriptor receive_control_block(const DescriptorSocket& socket, const Introduction& owner) const {
    const WaitLimit limit{.seconds = deadline_};
    while (true) {
      if (auto message = socket.receive()) {
        if (message->file.valid()) return std::move(message->file);
        throw system_error("cannot have more files open", EMFILE);
      }
      if (has_ended(owner.process)) throw system_error(str("rank ", owner.rank, " is not running"), ESRCH);
      require_in_time(limit, owner.rank,
                      str("until rank ", owner.rank, " sends the file of the group's shared memory"));
      socket.wait(kRetryMs);
    }
  }

  // Threads of the owner's process use its mapping, because the thread sanitizer tracks addresses, not pages.
  std::shared_ptr<ControlBlock> attach(const DescriptorSocket& socket, const Introduction& owner,
                                       const ControlBlockAddress& address) const {
    auto control = owner.process == getpid() ? PublishedHandle<ControlBlock>::take(address.control)
                                             : map_control_block(receive_control_block(socket, owner));
    if (!control) throw system_error(str("rank ", owner.rank, " no longer offers the control block"), ESRCH);
    control->join(rank_);  // so that peers notice if this process dies from here on
    return control;
  }

  // Collective. Throws on every rank if one of them could not attach.
  void require_all_attached(int my_error, const Topology& topology) const {
    const std::vector<int> errors = gather(my_error);
    for (int rank = 0; rank < ranks_; ++rank) {
      if (errors[rank] == 0) continue;
      // All ranks are alive, since they have called: a process that does not exist here runs on another host.
      if (errors[rank] == ESRCH) {
        std::string ranks;
        for (const int local : topology.ranks_of(topology.node_of(rank)))
          ranks += str(ranks.empty() ? "" : ", ", local);
        throw UnsupportedError(
            str("ranks ", ranks, " have the same boot id and namespaces but are not on one host (",
                introductions_[rank].host_name, "): set FERRY_HOST_ID to another text on each host"));
      }
      throw system_error(str("rank ", rank, " cannot open the group's shared memory"), errors[rank]);
    }
  }

  // Throws TimeoutError after the deadline, or if the program asks to stop. Unlike other errors it is not
  // told to the peers through the bootstrap: a rank that is late here would be late there too.
  void require_in_time(const WaitLimit& limit, int peer, const std::string& reason) const {
    const WaitRecord record{.operation = Operation::construct, .rank = rank_, .peer = peer};
    const auto interrupted = interrupt_requested.load();
    if (interrupted != nullptr && interrupted())
      throw PeerLostError(str("rank ", rank_, " was interrupted while it joined the group"), record);
    if (limit.seconds_left() > 0) return;
    throw TimeoutError(
        str("rank ", rank_, " waited ", limit.seconds, " s ", reason,
            peer < 0 ? "" : ": is its process stopped?", " Group::set_deadline() allows more time"),
        record);
  }

  BootstrapLink& link_;
  int rank_, ranks_;
  double deadline_;
  std::vector<Introduction> introductions_;  // [ranks]
};

}  // namespace

Meeting meet(BootstrapLink& link, int rank, int ranks, const std::string& host_id, double deadline) {
  return Rendezvous(link, rank, ranks, deadline).run(host_id);
}

}  // namespace ferry
