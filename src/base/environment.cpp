#include "base/environment.hpp"

#include <cstdlib>

namespace ferry {

namespace {

// Sets `value` to the variable, unless that is not set or empty.
void read_variable(std::string& value, const char* name) {
  const char* text = std::getenv(name);
  if (text != nullptr && *text != '\0') value = text;
}

}  // namespace

Environment Environment::read() {
  Environment environment;
  read_variable(environment.shm_dir, "FERRY_SHM_DIR");
  read_variable(environment.mpi_module, "FERRY_MPI_MODULE");
  read_variable(environment.host_id, "FERRY_HOST_ID");
  read_variable(environment.launch, "FERRY_LAUNCH");
  read_variable(environment.traces, "FERRY_TRACES");
#ifdef FERRY_TEST_HOOKS
  std::string jitter = "0";
  read_variable(jitter, "FERRY_JITTER");
  environment.jitter = std::atoi(jitter.c_str());
  read_variable(environment.stall, "FERRY_STALL");
#endif
  return environment;
}

}  // namespace ferry
