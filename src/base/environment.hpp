// Every environment variable that Ferry reads.
#pragma once

#include <string>

namespace ferry {

struct Environment {
  std::string shm_dir = "/dev/shm";  // FERRY_SHM_DIR: a tmpfs in which processes share memory
  std::string mpi_module;  // FERRY_MPI_MODULE: path of the MPI module; empty: looked for beside Ferry
  std::string traces;      // FERRY_TRACES: folder of routing traces; empty: none

#if FERRY_TEST_HOOKS
  // Fault injection in kernels, in test builds only: an inherited variable must not stop a production rank.
  int jitter = 0;     // FERRY_JITTER: percent of the kernels' fault points at which a thread pauses
  std::string stall;  // FERRY_STALL: the fault point at which this process's kernels stop; empty: none
#endif

  static Environment read();  // an empty variable counts as not set
};

}  // namespace ferry
