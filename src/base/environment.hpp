// Every environment variable that the library reads.
#pragma once

#include <span>
#include <string>

namespace ferry {

struct Environment {
  // Unset variables are empty. environment_variables() says what each means.
  std::string shm_dir, mpi_module, nccl_blocking, nccl_library, nccl_register, nvshmem_library,
      nvshmem_module, host_id, launch, traces, log, nvtx;

#ifdef FERRY_TEST_HOOKS
  // Fault injection in kernels, in test builds only: an inherited variable must not stop a production rank.
  // FERRY_JITTER: percentage of the kernels' fault points at which a thread pauses for a random time.
  int jitter = 0;
  // FERRY_STALL: the fault point at which kernels of this process stop until the group has failed, which
  // another rank must cause (backends/cuda/protocol/fault_injection.hpp). Empty: none.
  std::string stall;
  // FERRY_STALL_RANK: the only rank that stops there. -1: every rank of this process.
  int stall_rank = -1;
  // FERRY_WIDE: 1 for the kernels of large groups in groups of any size
  // (backends/cuda/protocol/lane_view.hpp).
  bool wide = false;
#endif

  // Reads the variables. An empty variable counts as not set.
  static Environment read();
  // Whether a variable of the process is set, and not "0". False if there is no memory to read it.
  static bool says_yes(std::string Environment::* variable) noexcept;
};

// A variable of the process; empty: it is not set. All of the library's variables are read here. A process
// with more rights than the user who started it, as by a setuid bit, reads none: they name files that it
// would load.
std::string environment_variable(const char* name);

struct EnvironmentVariable {
  const char* name;
  std::string Environment::* value;
  const char* meaning;  // one line, for users
};

// The variables for users, in the order in which they are listed.
std::span<const EnvironmentVariable> environment_variables();

}  // namespace ferry
