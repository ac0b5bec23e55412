// NCCL, opened at run time: building Ferry needs no part of it. Declares the functions that Ferry calls.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace ferry {

struct Nccl {
  // Types and values as NCCL declares them. A stream is a cudaStream_t.
  struct UniqueId {
    char bytes[128];
  };
  using Comm = void*;
  static constexpr int kSuccess = 0, kInProgress = 7;  // ncclSuccess, ncclInProgress
  static constexpr int kBytes = 0;                     // ncclInt8

  // ncclConfig_t of NCCL 2.18, which later versions read too.
  struct Config {
    std::size_t size = sizeof(Config);
    unsigned magic = 0xcafebeef;
    unsigned version = 21800;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char* net_name;
    int split_share;
    int traffic_class;  // of NCCL 2.26; earlier versions have padding there
  };
  static constexpr int kOldest = 21800;

  int (*version)(int* version);
  int (*unique_id)(UniqueId* id);
  int (*init_rank)(Comm* comm, int ranks, UniqueId id, int rank);
  int (*init_rank_config)(Comm* comm, int ranks, UniqueId id, int rank, Config* config);
  int (*async_error)(Comm comm, int* status);
  int (*finalize)(Comm comm);
  int (*destroy)(Comm comm);
  int (*abort)(Comm comm);
  const char* (*error_text)(int status);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void* data, std::size_t count, int type, int peer, Comm comm, void* stream);
  int (*receive)(void* data, std::size_t count, int type, int peer, Comm comm, void* stream);
  // Null before 2.19.
  int (*register_memory)(Comm comm, void* data, std::size_t bytes, void** handle);
  int (*deregister_memory)(Comm comm, void* handle);

  std::string path;  // of the library

  // Throws SystemError with the function's name and NCCL's own error text unless `status` is kSuccess.
  void require(int status, const char* function) const;
  int version_number() const;        // such as 22809
  std::string version_text() const;  // such as 2.28.9
};

// Paths at which Python installations keep the library, those of VIRTUAL_ENV, PYTHONPATH and PATH first.
std::vector<std::string> nccl_candidates();

// Loads the library from `path`. If that is empty, from FERRY_NCCL_LIBRARY; without that, searches with the
// loader and then nccl_candidates(). It stays loaded. Any thread.
// @throws UnsupportedError  the library or one of its functions was not found, or it is too old
const Nccl& load_nccl(std::string_view path = {});

}  // namespace ferry
