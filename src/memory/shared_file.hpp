// A file without a name in the shared-memory directory.
#pragma once

#include <cstdint>

#include "memory/file_descriptor.hpp"
#include "memory/mapping.hpp"

namespace ferry {

// `bytes` zero bytes, all of them reserved, mapped once. Other processes open it through the descriptor while
// that is open; the memory is freed when the last mapping goes, however its process ends. SystemError with
// the directory, the bytes wanted and the bytes free.
class SharedFile {
 public:
  explicit SharedFile(std::int64_t bytes);

  const Descriptor& descriptor() const { return descriptor_; }
  Mapping take_mapping() { return std::move(mapping_); }

 private:
  Descriptor descriptor_;
  Mapping mapping_;
};

}  // namespace ferry
