// Says whether ranks over NVSHMEM can run on this machine.
#pragma once

#include <cstdlib>
#include <string>

#include "base/text.hpp"
#include "harness/device.hpp"
#include "runtime/support.hpp"

#ifdef FERRY_TEST_HAS_NVSHMEM
#include "backends/nvshmem/session.hpp"
#endif

namespace ferry::contract {

// The reason why that many ranks, processes, cannot; empty: they can. Ranks share a GPU only under MPS, whose
// daemon CUDA_MPS_PIPE_DIRECTORY names.
inline std::string no_nvshmem_for([[maybe_unused]] int ranks) {
#ifdef FERRY_TEST_HAS_NVSHMEM
  if (ranks > device::count() && std::getenv("CUDA_MPS_PIPE_DIRECTORY") == nullptr)
    return str(ranks, " ranks on ", device::count(), " GPU(s) need MPS");
  // In a process of its own: ranks are forked from this one.
  if (test::run_process([] { nvshmem::load_module(); }) != 0) return "there is no NVSHMEM";
  return {};
#else
  return "this build has no module for NVSHMEM";
#endif
}

}  // namespace ferry::contract
