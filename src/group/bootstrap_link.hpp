// A rank's link to all ranks of a group, over a bootstrap: the caller's functions, or MPI.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "ferry/group.hpp"

namespace ferry {

// One thread at a time. Both functions are collective and block until all ranks have called. While they wait,
// they call `check` at least every 10 ms; `check` throws to give up. After any exception the link is failed:
// it may not be used again.
class BootstrapLink {
 public:
  virtual ~BootstrapLink() = default;

  // Returns the bytes of every rank, in rank order. All ranks pass equally many.
  virtual std::vector<std::byte> all_gather(std::vector<std::byte> mine,
                                            const std::function<void()>& check) = 0;
  virtual void barrier(const std::function<void()>& check) = 0;
};

// A link over the caller's functions, which run on a thread of its own. A function that has not returned when
// the link gives up is abandoned. Throws SystemError if the thread cannot be started.
std::unique_ptr<BootstrapLink> link_by_functions(std::shared_ptr<const Bootstrap> bootstrap);

// A link over MPI, which runs on the calling thread. Throws as open_mpi().
std::unique_ptr<BootstrapLink> link_by_mpi();

}  // namespace ferry
