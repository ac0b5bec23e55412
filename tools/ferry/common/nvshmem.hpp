// NVSHMEM as this program finds it.
#pragma once

#include <string>

namespace ferry::app {

// The version that the backend nvshmem would use.
// @throws UnsupportedError  there is none, or no module for it
std::string nvshmem_version();

}  // namespace ferry::app
