// Calls of NCCL that end with a deadline, for blocking and non-blocking communicators.
#pragma once

#include <functional>
#include <memory>

#include "engine/engine.hpp"
#include "engine/nccl_library.hpp"

namespace ferry {

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
