// Loads NCCL at run time and declares the few functions that the baseline of `ferry bench` calls, so that
// nothing of NCCL is needed to build.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace ferry::app {

struct Nccl {
  // Types and values as NCCL declares them. A stream is a cudaStream_t.
  struct UniqueId {
    char bytes[128];
  };
  using Comm = void*;
  static constexpr int kSuccess = 0, kBytes = 0, kInt32 = 2;  // ncclSuccess, ncclInt8, ncclInt32

  int (*version)(int* version);
  int (*unique_id)(UniqueId* id);
  int (*init_rank)(Comm* comm, int ranks, UniqueId id, int rank);
  int (*destroy)(Comm comm);
  const char* (*error_text)(int status);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void* data, std::size_t count, int type, int peer, Comm comm, void* stream);
  int (*receive)(void* data, std::size_t count, int type, int peer, Comm comm, void* stream);

  std::string path;  // of the library

  // Throws SystemError with the function's name and NCCL's own error text unless `status` is kSuccess.
  void require(int status, const char* function) const;
  std::string version_text() const;  // such as 2.28.9
};

// Paths at which Python installations keep the library, those of VIRTUAL_ENV, PYTHONPATH and PATH first.
std::vector<std::string> nccl_candidates();

// Loads the library from `path`; if that is empty, searches with the loader and then nccl_candidates(). It
// stays loaded. Turns NVLink multicast off (NCCL_NVLS_ENABLE=0).
// @throws UnsupportedError  the library or one of its functions was not found
const Nccl& load_nccl(const std::string& path);

}  // namespace ferry::app
