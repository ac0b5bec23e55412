// Sets what the CUDA driver reads from the environment when it starts, for programs in which several ranks
// share a device. Include it in one source file of such a program's library.
#pragma once

#include <cstdlib>

namespace ferry::contract {

// Kernels of different ranks wait for one another. So each stream needs a hardware queue of its own, and a
// module must not be loaded while such kernels run. A namespace-scope constant: initialised before main().
inline const bool driver_environment_is_set = [] {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  return true;
}();

}  // namespace ferry::contract
