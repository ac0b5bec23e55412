#include "memory/local_memory.hpp"

namespace ferry {

LocalMemory::LocalMemory(std::int64_t bytes) : mapping_(bytes > 0 ? Mapping::anonymous(bytes) : Mapping()) {}

}  // namespace ferry
