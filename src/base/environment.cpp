#include "base/environment.hpp"

#include <cstdlib>

namespace ferry {

std::string environment_variable(const char* name) {
  const char* text = secure_getenv(name);
  return text != nullptr ? text : "";
}

std::span<const EnvironmentVariable> environment_variables() {
  static constexpr EnvironmentVariable kVariables[] = {
      {"FERRY_HOST_ID", &Environment::host_id,
       "any text; ranks of one host with different texts count as ranks of different hosts"},
      {"FERRY_LAUNCH", &Environment::launch, "set by `ferry launch` for the ranks that it starts"},
      {"FERRY_LOG", &Environment::log,
       "1: a line on stderr when a rank joins, an exchange is made, or the group fails"},
      {"FERRY_MPI_MODULE", &Environment::mpi_module,
       "path of libferry_mpi.so, if it is not beside the library"},
      {"FERRY_NCCL_BLOCKING", &Environment::nccl_blocking,
       "1, on all ranks: the engine nccl starts transfers in the calling thread, not in one of NCCL's"},
      {"FERRY_NCCL_LIBRARY", &Environment::nccl_library,
       "path of libnccl.so.2, if neither the loader nor a Python installation has it"},
      {"FERRY_NCCL_REGISTER", &Environment::nccl_register,
       "1, on all ranks: the engine nccl registers the memory of messages with NCCL 2.19 or later"},
      {"FERRY_NVSHMEM_LIBRARY", &Environment::nvshmem_library,
       "path of libnvshmem_host.so.3, if neither the loader nor a Python installation has it"},
      {"FERRY_NVSHMEM_MODULE", &Environment::nvshmem_module,
       "path of libferry_nvshmem.so, if it is not beside the library"},
      {"FERRY_NVTX", &Environment::nvtx,
       "1: ranges of all calls for profilers that read NVTX, such as Nsight Systems; needs a build with "
       "CUDA"},
      {"FERRY_SHM_DIR", &Environment::shm_dir,
       "folder on a tmpfs for the memory that processes share; default: files in memory (memfd)"},
      {"FERRY_TRACES", &Environment::traces, "folder of recorded routing traces"},
  };
  return kVariables;
}

Environment Environment::read() {
  Environment environment;
  for (const EnvironmentVariable& variable : environment_variables())
    environment.*variable.value = environment_variable(variable.name);
#ifdef FERRY_TEST_HOOKS
  const auto read_variable = [](const char* name, int otherwise) {
    const std::string text = environment_variable(name);
    return text.empty() ? otherwise : std::atoi(text.c_str());
  };
  environment.jitter = read_variable("FERRY_JITTER", 0);
  environment.stall = environment_variable("FERRY_STALL");
  environment.stall_rank = read_variable("FERRY_STALL_RANK", -1);
  environment.wide = read_variable("FERRY_WIDE", 0) != 0;
#endif
  return environment;
}

bool Environment::says_yes(std::string Environment::* variable) noexcept {
  try {
    const Environment environment = read();
    return !(environment.*variable).empty() && environment.*variable != "0";
  } catch (...) {
    return false;
  }
}

}  // namespace ferry
