// An unnamed file that several processes map: in memory, sealed against shrinking; or, if FERRY_SHM_DIR is
// set, in that folder, where the system offers no seals.
#pragma once

#include <cstdint>

#include "base/descriptors.hpp"
#include "base/mapping.hpp"

namespace ferry {

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

}  // namespace ferry
