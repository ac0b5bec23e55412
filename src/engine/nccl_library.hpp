// NCCL, opened at run time: building Ferry needs no part of it. Declares the functions that Ferry calls, and
// calls of them that end with a deadline.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.hpp"

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

using NcclCheck = std::function<void()>;

// Waits until a call of a non-blocking communicator, which has returned `status`, has ended. Throws what
// `check` throws, and SystemError if the call failed.
void settle_nccl(const Nccl& nccl, Nccl::Comm comm, int status, const char* function, const NcclCheck& check);

// Runs calls that may block until the peers make theirs, in a thread of their own. If `check` throws, the
// thread is abandoned, with what `calls` holds. Throws what `check` or `calls` throw.
void run_blocking_nccl(const std::function<void()>& calls, const NcclCheck& check);

// A group of sends and receives of the calling thread. It must be closed: otherwise NCCL takes every later
// call of the thread, on any communicator, for a part of the group.
class NcclGroup {
 public:
  explicit NcclGroup(const Nccl& nccl) : nccl_(nccl) { nccl_.require(nccl_.group_start(), "ncclGroupStart"); }
  ~NcclGroup() {
    if (open_) nccl_.group_end();  // one of its calls has failed, so NCCL drops the others
  }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  // Starts the transfers. Returns NCCL's status.
  int end() {
    open_ = false;
    return nccl_.group_end();
  }

 private:
  const Nccl& nccl_;
  bool open_ = true;
};

// The members of a communicator. `blocks`: the communicator starts transfers in the calling thread; a
// non-blocking one starts a thread for each.
struct NcclMembers {
  Nccl::UniqueId id;
  int rank, ranks;
  bool blocks;
};

// Collective. A blocking communicator is returned connected with every peer, so that later calls wait for no
// peer on the host. `stream`: for the transfer that connects.
Nccl::Comm connect_nccl(const Nccl& nccl, const NcclMembers& members, const DeviceAccess& device,
                        const std::shared_ptr<DeviceStream>& stream, const NcclCheck& check);

}  // namespace ferry
