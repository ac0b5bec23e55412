// The few functions of NCCL that the baseline of `ferry bench` calls, found at run time: nothing of NCCL is
// needed to build.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace ferry::app {

struct Nccl {
  // As NCCL declares them; a stream is a cudaStream_t.
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

  std::string path;  // where it was found

  // Throws SystemError naming the function and NCCL's own words.
  void require(int status, const char* function) const;
  std::string version_text() const;  // such as 2.28.9
};

// Where the library may lie, besides where the loader looks: in Python installations, those that
// VIRTUAL_ENV, PYTHONPATH and PATH name first.
std::vector<std::string> nccl_places();

// Loads it from `path`, or if that is empty from where it is found; it stays loaded. Multicast stays off
// whatever NCCL would choose. Throws UnsupportedError with the places, or the function that it has not.
const Nccl& load_nccl(const std::string& path);

}  // namespace ferry::app
