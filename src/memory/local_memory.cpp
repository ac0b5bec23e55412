#include "memory/local_memory.hpp"

namespace ferry {

LocalMemory::LocalMemory(std::int64_t bytes) : mapping_(Mapping::anonymous(bytes)) {}

}  // namespace ferry
