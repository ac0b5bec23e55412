// Group::custom and Group::mpi: ranks that meet through a bootstrap of the caller, then share a control
// block.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/system_error.hpp"
#include "base/text.hpp"
#include "group/launcher.hpp"
#include "memory/file_descriptor.hpp"
#include "memory/published_handle.hpp"

namespace ferry {

namespace {

// What each rank sends to the others through the bootstrap, before they share memory.
struct Introduction {
  int rank = -1;
  int process = 0;
  int descriptor = -1;                    // rank 0: file descriptor of the control block's memory
  const ControlBlock* control = nullptr;  // rank 0: its own view of the control block
  int error_number = 0;                   // rank 0: errno if it could not create the control block
  std::uint64_t pid_namespace = 0;        // process numbers mean nothing in another namespace
  char boot_id[40] = {};                  // of the running kernel: identifies the host
  char host_name[64] = {};                // for messages
};

// Rank 0's control block, kept open until every rank has attached to it.
struct PublishedControlBlock {
  Descriptor memory;
  std::optional<PublishedHandle<ControlBlock>> handle;
};

std::uint64_t pid_namespace() {
  struct stat status{};
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

Introduction introduce(int rank) {
  Introduction mine;
  mine.rank = rank;
  mine.process = getpid();
  mine.pid_namespace = pid_namespace();
  std::ifstream("/proc/sys/kernel/random/boot_id").get(mine.boot_id, sizeof mine.boot_id);
  gethostname(mine.host_name, sizeof mine.host_name - 1);
  return mine;
}

void require_one_host(const std::vector<Introduction>& introductions) {
  std::set<std::string> hosts;
  bool one_host = true;
  for (const Introduction& rank : introductions) {
    one_host &= std::strcmp(rank.boot_id, introductions[0].boot_id) == 0 &&
                rank.pid_namespace == introductions[0].pid_namespace;
    hosts.insert(rank.host_name);
  }
  if (one_host) return;
  std::string names;
  for (const std::string& host : hosts) names += (names.empty() ? "" : ", ") + host;
  throw UnsupportedError(
      str("the ranks of a group must share one host and one process namespace; these run on: ", names));
}

class CustomLauncher : public Group::Launcher {
 public:
  explicit CustomLauncher(Bootstrap bootstrap)
      : Launcher({1, bootstrap.ranks}), bootstrap_(std::move(bootstrap)) {}

  void run(const std::function<void(Rank)>& body) override { run_rank(rendezvous(), bootstrap_.rank, body); }
  Rank join() override { return join_as(rendezvous(), bootstrap_.rank); }

 private:
  // Collective. Rank 0 creates the control block, the others attach to it. Every rank throws if one fails.
  std::shared_ptr<ControlBlock> rendezvous() const {
    Introduction mine = introduce(bootstrap_.rank);
    PublishedControlBlock published;  // on rank 0, until the barrier below
    if (bootstrap_.rank == 0) create_control_block(published, mine);
    const std::vector<Introduction> introductions = gather_introductions(mine);
    require_one_host(introductions);
    if (introductions[0].error_number != 0)
      throw system_error("rank 0 cannot make the group's shared memory", introductions[0].error_number);

    std::shared_ptr<ControlBlock> control;
    int error = 0;
    try {
      control = attach(introductions[0]);
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
    published.memory = Descriptor(memfd_create("ferry", MFD_CLOEXEC));
    if (!published.memory.valid() ||
        ftruncate(published.memory.number(), ControlBlock::bytes(ranks())) != 0) {
      mine.error_number = errno;
      return;
    }
    try {
      published.handle.emplace(map_control_block(published.memory));
    } catch (const SystemError& refused) {
      mine.error_number = refused.error_number;
      return;
    }
    mine.descriptor = published.memory.number();
    mine.control = published.handle->address();
  }

  std::shared_ptr<ControlBlock> map_control_block(const Descriptor& memory) const {
    return std::make_shared<ControlBlock>(Mapping::file(memory.number(), ControlBlock::bytes(ranks())),
                                          ranks());
  }

  // Threads of rank 0's process use its mapping, because the thread sanitizer tracks addresses, not pages.
  std::shared_ptr<ControlBlock> attach(const Introduction& owner) const {
    auto control = owner.process == getpid()
                       ? PublishedHandle<ControlBlock>::take(owner.control)
                       : map_control_block(Descriptor::of_process(owner.process, owner.descriptor));
    if (!control) throw system_error("rank 0 no longer offers the control block", ESRCH);
    control->join(bootstrap_.rank);  // so that peers notice if this process dies from here on
    return control;
  }

  Bootstrap bootstrap_;
};

}  // namespace

std::shared_ptr<Group::Launcher> launch_custom(Bootstrap bootstrap) {
  return std::make_shared<CustomLauncher>(std::move(bootstrap));
}

}  // namespace ferry
