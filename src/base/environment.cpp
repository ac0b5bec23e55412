#include "base/environment.hpp"

#include <cstdlib>

namespace ferry {

namespace {

void take(std::string& value, const char* name) {
  const char* found = std::getenv(name);
  if (found != nullptr && *found != '\0') value = found;
}

}  // namespace

Environment Environment::read() {
  Environment environment;
  take(environment.shm_dir, "FERRY_SHM_DIR");
  take(environment.mpi_module, "FERRY_MPI_MODULE");
  take(environment.traces, "FERRY_TRACES");
#if FERRY_TEST_HOOKS
  std::string jitter = "0";
  take(jitter, "FERRY_JITTER");
  environment.jitter = std::atoi(jitter.c_str());
  take(environment.stall, "FERRY_STALL");
#endif
  return environment;
}

}  // namespace ferry
