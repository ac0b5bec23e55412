#include "tools/ferry/common/nvshmem.hpp"

#include <fmt/core.h>

#include "backends/nvshmem/session.hpp"

namespace ferry::app {

std::string found_nvshmem() {
  int major = 0, minor = 0, patch = 0;
  nvshmem::load_module().version(&major, &minor, &patch);
  return fmt::format("{}.{}.{}, {}", major, minor, patch, nvshmem::library_path());
}

}  // namespace ferry::app
