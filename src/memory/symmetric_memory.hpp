// Symmetric memory: a region of the same size on every rank, writable by every rank of the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/mapping.hpp"
#include "ferry/group.hpp"

namespace ferry {

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

}  // namespace ferry
