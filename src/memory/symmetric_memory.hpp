// Memory that every rank has and every rank of the host can write to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ferry/group.hpp"
#include "memory/mapping.hpp"

namespace ferry {

// Regions of the same size on every rank, zero at first, all of it present: using it neither faults for want
// of memory nor kills the process. Threads of one process share private mappings, which live until the last
// rank lets go. Processes share unnamed files of the shared-memory directory, so nothing is left behind by a
// killed one.
class SymmetricMemory {
 public:
  // Collective. Every rank asks for the same number of bytes (UsageError otherwise). A rank that cannot get
  // its part ends the construction on all ranks with SystemError.
  SymmetricMemory(const Rank& rank, std::int64_t bytes);

  std::byte* at(int rank, std::int64_t offset) const { return regions_[rank]->data() + offset; }
  std::byte* mine(std::int64_t offset) const { return at(rank_, offset); }
  std::int64_t bytes() const { return bytes_; }

 private:
  void share_with_threads(const Rank& rank);
  void share_with_processes(const Rank& rank);

  int rank_;
  std::int64_t bytes_;
  std::vector<std::shared_ptr<Mapping>> regions_;  // [ranks]
};

}  // namespace ferry
