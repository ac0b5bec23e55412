// Memory of one rank alone: zero at first, given by the system page by page as it is touched.
#pragma once

#include <cstddef>
#include <cstdint>

#include "memory/mapping.hpp"

namespace ferry {

class LocalMemory {
 public:
  LocalMemory() = default;
  explicit LocalMemory(std::int64_t bytes);  // aligned to a page; SystemError when the system refuses

  std::byte* data() const { return mapping_.data(); }
  std::int64_t bytes() const { return mapping_.bytes(); }

 private:
  Mapping mapping_;
};

}  // namespace ferry
