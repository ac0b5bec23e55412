#include "group/process_monitor.hpp"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "base/system_error.hpp"
#include "group/control_block.hpp"

namespace ferry {

ProcessWatch::ProcessWatch(const GroupControl& control)
    : control_(control), descriptors_(control.ranks(), -1) {}

ProcessWatch::~ProcessWatch() {
  for (const int descriptor : descriptors_) {
    if (descriptor >= 0) close(descriptor);
  }
}

// False if the process is gone already.
bool ProcessWatch::open(int rank) {
  const int process = control_.process_of(rank);
  if (process == 0 || process == getpid()) return true;
  descriptors_[rank] = static_cast<int>(syscall(SYS_pidfd_open, process, 0));
  if (descriptors_[rank] >= 0) return true;
  if (errno == ESRCH) return false;
  throw system_error(str("cannot watch process ", process, " of rank ", rank), errno);
}

bool ProcessWatch::ended(int rank, int milliseconds) {
  if (control_.lock(rank).owner_died()) return true;
  if (descriptors_[rank] < 0 && !open(rank)) return true;
  if (descriptors_[rank] < 0) return false;
  pollfd entry{descriptors_[rank], POLLIN, 0};
  // The lock again: it may have been marked meanwhile, long before the descriptor tells.
  return poll(&entry, 1, milliseconds) > 0 || control_.lock(rank).owner_died();
}

bool ProcessWatch::ends_within(int rank, int milliseconds) {
  const std::lock_guard lock(mutex_);
  return ended(rank, milliseconds);
}

int ProcessWatch::find_device_error() {
  const std::lock_guard lock(mutex_);
  for (int rank = 0; rank < control_.ranks(); ++rank) {
    // In this order: a rank that left said so before its process ended, and with it the thread that held its
    // lock.
    if (ended(rank, 0) && control_.presence_of(rank) == Presence::present) return rank;
  }
  return -1;
}

}  // namespace ferry
