// How the ranks of a group agree on small data: the collective behind Rank::all_gather and everything that
// ranks decide together.
#pragma once

#include <cstddef>

namespace ferry {

// One rank's end. Failures, liveness and the deadline are the group's: an implementation ends its waits with
// the errors of Waiter::wait, and fails the group when it gives up.
class ControlPlane {
 public:
  virtual ~ControlPlane() = default;

  // Collective, as Rank::all_gather; 0 bytes: a barrier. One thread at a time.
  virtual void all_gather(const void* mine, void* all, std::size_t bytes) = 0;
};

}  // namespace ferry
