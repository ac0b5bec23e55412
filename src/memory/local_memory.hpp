// Memory that only one rank uses: zero at first; the system provides each page at its first access.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/mapping.hpp"

namespace ferry {

class LocalMemory {
 public:
  LocalMemory() = default;
  // Aligned to a page. 0: none. Throws SystemError if the system refuses.
  explicit LocalMemory(std::int64_t bytes) : mapping_(bytes > 0 ? Mapping::anonymous(bytes) : Mapping()) {}

  std::byte* data() const { return mapping_.data(); }
  std::int64_t bytes() const { return mapping_.bytes(); }

 private:
  Mapping mapping_;
};

}  // namespace ferry
