// Every environment variable that Ferry reads.
#pragma once

#include <string>

namespace ferry {

struct Environment {
  std::string shm_dir = "/dev/shm";  // FERRY_SHM_DIR: a tmpfs in which processes share memory
  std::string mpi_module;  // FERRY_MPI_MODULE: path of the MPI module; empty: looked for beside Ferry
  std::string traces;      // FERRY_TRACES: folder of routing traces; empty: none

  int jitter =
      0;  // FERRY_JITTER: percent of the stores, flags and polls of kernels that are delayed at random

  // FERRY_STALL: what kernels of this process stop before (cuda/fault_injection.hpp), until the group has
  // failed, which takes a rank elsewhere; empty: nothing
  std::string stall;

  static Environment read();  // an empty variable counts as not set
};

}  // namespace ferry
