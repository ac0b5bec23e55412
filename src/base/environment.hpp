// Every environment variable that the library reads.
#pragma once

#include <string>

namespace ferry {

struct Environment {
  // FERRY_SHM_DIR: the folder, on a tmpfs, of the files through which processes share memory.
  std::string shm_dir = "/dev/shm";
  // FERRY_MPI_MODULE: path of the MPI module. Empty: it is searched for beside the library.
  std::string mpi_module;
  // FERRY_TRACES: folder of recorded routing traces. Empty: none.
  std::string traces;

  // FERRY_JITTER: percentage of the kernels' stores, flags and polls that are delayed at random.
  int jitter = 0;
  // FERRY_STALL: the point at which kernels of this process stop until the group has failed, which another
  // rank must cause (cuda/protocol/fault_injection.hpp). Empty: none.
  std::string stall;

  // Reads the variables. An empty variable counts as not set.
  static Environment read();
};

}  // namespace ferry
