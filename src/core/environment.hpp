// Every environment variable that Ferry reads.
#pragma once

#include <string>

namespace ferry {

struct Environment {
  std::string shm_dir = "/dev/shm";  // FERRY_SHM_DIR: a tmpfs in which processes share memory
  std::string mpi_module;  // FERRY_MPI_MODULE: path of the MPI module; empty: looked for beside Ferry
  std::string traces;      // FERRY_TRACES: folder of routing traces; empty: none

  static Environment read();  // an empty variable counts as not set
};

}  // namespace ferry
