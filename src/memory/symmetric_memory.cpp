#include "memory/symmetric_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "base/environment.hpp"
#include "base/errors.hpp"
#include "base/published_handle.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"
#include "group/agreement.hpp"
#include "group/rank_state.hpp"

namespace ferry {
namespace {

using Clock = std::chrono::steady_clock;

// Between two checks of the peers; also how soon a send to a full queue is tried again.
constexpr int kCheckIntervalMs = 10;

class DescriptorExchange {
 public:
  DescriptorExchange(const Rank& rank, const FileDescriptor& mine)
      : rank_(rank),
        mine_(mine),
        addresses_(rank.size()),
        sent_(rank.size()),
        received_(rank.size()),
        files_(rank.size()) {}

  std::vector<FileDescriptor> run() {
    SocketAddress address{};
    run_on_all_ranks(rank_, [&] { address = open_socket(); });
    rank_.all_gather(&address, addresses_.data(), sizeof address);
    // The agreement at the end also keeps every socket open until all ranks have received.
    run_on_all_ranks(rank_, [&] { transfer(); });
    return std::move(files_);
  }

 private:
  SocketAddress open_socket() {
    files_[rank_.index()] = FileDescriptor(fcntl(mine_.number(), F_DUPFD_CLOEXEC, 0));
    if (!files_[rank_.index()].valid()) throw system_error("cannot duplicate a file", errno);
    sent_[rank_.index()] = received_[rank_.index()] = 1;
    return socket_.emplace().address();
  }

  void transfer() {
    for (const Clock::time_point start = Clock::now();; check_peers(start)) {
      // A send that fails is repeated: the queue is full, or the peer is dying, which check_peers() finds.
      for (int peer = 0; peer < rank_.size(); ++peer) {
        if (!sent_[peer]) sent_[peer] = socket_->send(addresses_[peer], rank_.index(), mine_) == 0;
      }
      receive_all();
      if (unfinished_peer() < 0) break;
      socket_->wait(kCheckIntervalMs);
    }
    for (int peer = 0; peer < rank_.size(); ++peer) {
      // A process at its limit of open files gets the message without the file.
      if (!files_[peer].valid()) throw system_error(str("cannot receive the file of rank ", peer), EMFILE);
    }
  }

  void receive_all() {
    while (std::optional<DescriptorSocket::Message> message = socket_->receive()) {
      if (message->from < 0 || message->from >= rank_.size()) continue;
      received_[message->from] = 1;
      files_[message->from] = std::move(message->file);
    }
  }

  // Throws if the group has failed or the deadline has expired.
  void check_peers(Clock::time_point start) {
    RankState& state = rank_.state();
    const WaitRecord record{Operation::construct, 0, rank_.index(), unfinished_peer(), 1, 0};
    if (state.check_peers(record)) state.control().throw_failure(record);
    if (Clock::now() - start < std::chrono::duration<double>(state.deadline())) return;
    state.time_out(record, state.deadline());
    state.control().throw_failure(record);
  }

  // A rank that has not sent its file or not taken this rank's yet, or -1.
  int unfinished_peer() const {
    for (int peer = 0; peer < rank_.size(); ++peer) {
      if (!sent_[peer] || !received_[peer]) return peer;
    }
    return -1;
  }

  const Rank& rank_;
  const FileDescriptor& mine_;
  std::optional<DescriptorSocket> socket_;
  std::vector<SocketAddress> addresses_;  // [ranks]
  std::vector<char> sent_, received_;     // [ranks]
  std::vector<FileDescriptor> files_;     // [ranks]
};

}  // namespace

std::vector<FileDescriptor> exchange_descriptors(const Rank& rank, const FileDescriptor& mine) {
  return DescriptorExchange(rank, mine).run();
}

namespace {

// Memory that can be allocated without swapping; the largest number if the system does not say.
std::int64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  const std::string key = "MemAvailable:";
  std::int64_t kibibytes = 0;
  for (std::string word; file >> word;) {
    if (word == key && file >> kibibytes) return kibibytes * 1024;
  }
  return std::numeric_limits<std::int64_t>::max();
}

// Files in memory, and file systems without a size limit, report 0 blocks.
std::int64_t free_bytes(int descriptor) {
  struct statvfs status{};
  if (fstatvfs(descriptor, &status) != 0 || status.f_blocks == 0) return available_memory();
  return static_cast<std::int64_t>(status.f_bavail * status.f_frsize);
}

std::int64_t allocated_bytes(int descriptor) {
  struct stat status{};
  return fstat(descriptor, &status) == 0 ? static_cast<std::int64_t>(status.st_blocks) * 512 : 0;
}

SystemError out_of_memory(const std::string& directory, std::int64_t needed, std::int64_t available,
                          int error) {
  return system_error(str("shared memory", directory.empty() ? "" : " in ", directory,
                          " is too small: ", counted(needed, "byte"), " needed, ", counted(available, "byte"),
                          " free, which are ", static_cast<double>(needed) / 1e9, " and ",
                          static_cast<double>(available) / 1e9,
                          " GB: make max_tokens, capacity or lanes smaller, or name another directory by "
                          "FERRY_SHM_DIR"),
                      error);
}

}  // namespace

SharedFile::SharedFile(std::int64_t bytes) {
  const std::string directory = Environment::read().shm_dir;
  const bool sealed = directory.empty();
  descriptor_ = FileDescriptor(sealed ? memfd_create("ferry", MFD_CLOEXEC | MFD_ALLOW_SEALING)
                                      : open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (!descriptor_.valid()) throw system_error(str("cannot create an unnamed file in ", directory), errno);

  const std::int64_t size = std::max<std::int64_t>(bytes, 1);
  const std::int64_t available = free_bytes(descriptor_.number());
  if (available < size) throw out_of_memory(directory, size, available, ENOSPC);
  if (ftruncate(descriptor_.number(), size) != 0) throw out_of_memory(directory, size, available, errno);
  // Sealed: no rank can shrink the file under the mappings of the others, whose accesses would raise SIGBUS.
  if (sealed && fcntl(descriptor_.number(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw system_error("cannot seal shared memory", errno);
  }
  mapping_ = Mapping::file(descriptor_.number(), size);
  try {
    mapping_.populate();
  } catch (const SystemError&) {
    // Other files took the space since it was counted. The pages of this file are about to be freed, so they
    // count as free.
    throw out_of_memory(directory, size,
                        free_bytes(descriptor_.number()) + allocated_bytes(descriptor_.number()), ENOSPC);
  }
}

SymmetricMemory::SymmetricMemory(const Rank& rank, std::int64_t bytes)
    : rank_(rank.index()), bytes_(bytes), regions_(rank.size()) {
  require_same_size(rank, bytes);
  if (rank.same_process()) {
    share_with_threads(rank);
  } else {
    share_with_processes(rank);
  }
}

void SymmetricMemory::share_with_threads(const Rank& rank) {
  run_on_all_ranks(rank, [&] {
    regions_[rank_] = std::make_shared<Mapping>(Mapping::anonymous(bytes_));
    regions_[rank_]->populate();
  });
  const PublishedHandle published(regions_[rank_]);
  const Mapping* mine = published.address();
  std::vector<const Mapping*> all(rank.size());
  rank.all_gather(&mine, all.data(), sizeof mine);
  run_on_all_ranks(rank, [&] {
    for (int peer = 0; peer < rank.size(); ++peer) {
      regions_[peer] = PublishedHandle<Mapping>::take(all[peer]);
      if (!regions_[peer]) throw UsageError(str("rank ", peer, " has released its symmetric memory"));
    }
  });
}

void SymmetricMemory::share_with_processes(const Rank& rank) {
  std::optional<SharedFile> file;
  run_on_all_ranks(rank, [&] { file.emplace(bytes_); });
  const std::vector<FileDescriptor> files = exchange_descriptors(rank, file->descriptor());
  run_on_all_ranks(rank, [&] {
    for (int peer = 0; peer < rank.size(); ++peer) {
      regions_[peer] = std::make_shared<Mapping>(peer == rank_ ? file->take_mapping()
                                                               : Mapping::file(files[peer].number(), bytes_));
    }
  });
}

}  // namespace ferry
