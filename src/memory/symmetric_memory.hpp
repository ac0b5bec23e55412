// Symmetric memory: a region of the same size on every rank, writable by every rank of the host; and the
// unnamed file that processes map for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/descriptors.hpp"
#include "base/mapping.hpp"
#include "ferry/group.hpp"

namespace ferry {

// In memory, sealed against shrinking; or, if FERRY_SHM_DIR is set, in that folder, where the system offers
// no seals.
//
// Creates and maps a file of `bytes` zeros and allocates all of its pages. Other processes open it through
// the descriptor while that is open. The memory is freed with the last mapping, even if a process is killed.
class SharedFile {
 public:
  // Throws SystemError with the directory, the bytes needed and the bytes free.
  explicit SharedFile(std::int64_t bytes);

  const FileDescriptor& descriptor() const { return descriptor_; }
  Mapping take_mapping() { return std::move(mapping_); }

 private:
  FileDescriptor descriptor_;
  Mapping mapping_;
};

// The regions are zero at first, and every page is allocated at construction, so no later access can fail for
// lack of memory. If all ranks are threads of one process, they share private mappings, which live until the
// last rank releases them. Processes share unnamed files in memory, sealed so that no rank can shrink them; a
// killed process leaves nothing behind.
class SymmetricMemory {
 public:
  // Collective. If an error occurs on one rank, every rank throws it.
  //
  // @throws UsageError   the ranks request different sizes
  // @throws SystemError  a rank cannot allocate its region
  SymmetricMemory(const Rank& rank, std::int64_t bytes);

  std::byte* at(int rank, std::int64_t offset) const { return regions_[rank]->data() + offset; }
  std::byte* mine(std::int64_t offset) const { return at(rank_, offset); }
  std::vector<std::byte*> sections(std::int64_t offset) const {  // at(rank, offset) of every rank
    std::vector<std::byte*> all;
    for (int rank = 0; rank < static_cast<int>(regions_.size()); ++rank) all.push_back(at(rank, offset));
    return all;
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  void share_with_threads(const Rank& rank);
  void share_with_processes(const Rank& rank);

  int rank_;
  std::int64_t bytes_;
  std::vector<std::shared_ptr<Mapping>> regions_;  // [ranks]
};

// All-gather of open files. Collective. Returns [ranks] descriptors: entry r is a duplicate of the one that
// rank r passed. Ranks must share a host and a network namespace; they may be threads of one process. A
// killed process leaves nothing behind.
// @throws PeerLostError, TimeoutError  as every collective
// @throws SystemError                  on all ranks, if one of them cannot have more files open
std::vector<FileDescriptor> exchange_descriptors(const Rank& rank, const FileDescriptor& mine);

}  // namespace ferry
