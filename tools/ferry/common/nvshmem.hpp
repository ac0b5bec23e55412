// NVSHMEM as this program finds it.
#pragma once

#include <string>

namespace ferry::app {

// Version and path of the library that the backend nvshmem would use.
// @throws UnsupportedError  there is none, or no module for it
std::string found_nvshmem();

}  // namespace ferry::app
