// Finds and opens the NVSHMEM module and the library that it needs.
#pragma once

#include <string>

#include "backends/nvshmem/module/module.hpp"

namespace ferry::nvshmem {

// Opened once in a process, and never closed. Any thread.
//
// The module is searched for at FERRY_NVSHMEM_MODULE, beside Ferry's library, beside the program, and by the
// loader. The library: the one that the process has loaded already, FERRY_NVSHMEM_LIBRARY, the loader's, and
// those of Python installations.
// @throws UnsupportedError  not found, or of another version of Ferry
const Module& load_module();

// As load_module(), but looks again in every call.
Module open_module();

// The path of NVSHMEM's library, which has its plug-ins beside it. Call after load_module().
// @throws UnsupportedError  the library is not loaded
std::string library_path();

}  // namespace ferry::nvshmem
