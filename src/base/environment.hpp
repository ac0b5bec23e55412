// Every environment variable that the library reads.
#pragma once

#include <string>

namespace ferry {

struct Environment {
  // FERRY_SHM_DIR: a folder on a tmpfs for the files through which processes share memory. Empty: files in
  // memory (memfd), which no rank can shrink.
  std::string shm_dir;
  // FERRY_MPI_MODULE: path of the MPI module. Empty: it is searched for beside the library.
  std::string mpi_module;
  // FERRY_HOST_ID: name of a simulated host. Ranks of one host with different names count as ranks of
  // different hosts. Empty: none.
  std::string host_id;
  // FERRY_LAUNCH: set by `ferry launch` for the ranks that it starts (group/launch_protocol.hpp). Empty: this
  // process was started otherwise.
  std::string launch;
  // FERRY_TRACES: folder of recorded routing traces. Empty: none.
  std::string traces;

#ifdef FERRY_TEST_HOOKS
  // Fault injection in kernels, in test builds only: an inherited variable must not stop a production rank.
  // FERRY_JITTER: percentage of the kernels' fault points at which a thread pauses for a random time.
  int jitter = 0;
  // FERRY_STALL: the fault point at which kernels of this process stop until the group has failed, which
  // another rank must cause (backends/cuda/protocol/fault_injection.hpp). Empty: none.
  std::string stall;
#endif

  // Reads the variables. An empty variable counts as not set.
  static Environment read();
};

}  // namespace ferry
