#include "group/process_monitor.hpp"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "base/descriptors.hpp"
#include "base/errors.hpp"
#include "group/control_block.hpp"

namespace ferry {

bool has_ended(int process) {
  const FileDescriptor descriptor(static_cast<int>(syscall(SYS_pidfd_open, process, 0)));
  if (!descriptor.valid()) return errno == ESRCH;
  pollfd entry{descriptor.number(), POLLIN, 0};
  return poll(&entry, 1, 0) > 0;
}

ProcessMonitor::ProcessMonitor(const ControlBlock& control)
    : control_(control), pidfds_(control.ranks(), -1) {}

ProcessMonitor::~ProcessMonitor() {
  for (const int pidfd : pidfds_) {
    if (pidfd >= 0) close(pidfd);
  }
}

// Returns false if the process no longer exists. Opens nothing for a rank that has not joined or that runs in
// this process.
bool ProcessMonitor::open_pidfd(int rank, int this_process) {
  const int process = control_.process_of(rank);
  if (process == 0 || process == this_process) return true;
  pidfds_[rank] = static_cast<int>(syscall(SYS_pidfd_open, process, 0));
  if (pidfds_[rank] >= 0) return true;
  if (errno == ESRCH) return false;
  throw system_error(str("cannot watch process ", process, " of rank ", rank), errno);
}

bool ProcessMonitor::ended(int rank, int this_process) {
  if (control_.liveness_lock(rank).holder_died()) return true;
  if (pidfds_[rank] < 0 && !open_pidfd(rank, this_process)) return true;
  if (pidfds_[rank] < 0) return false;
  pollfd entry{pidfds_[rank], POLLIN, 0};
  // Checks the lock again after the poll: it is marked long before the pidfd becomes readable.
  return poll(&entry, 1, 0) > 0 || control_.liveness_lock(rank).holder_died();
}

int ProcessMonitor::find_dead_rank(int excused) {
  const std::lock_guard lock(mutex_);
  const int this_process = getpid();
  for (int rank = 0; rank < control_.ranks(); ++rank) {
    // Order matters: a rank stores `left` before its process, and with it the thread that holds its lock,
    // ends. So a status loaded after the end was seen shows `left` if the rank left.
    if (rank != excused && ended(rank, this_process) && control_.status_of(rank) == RankStatus::joined)
      return rank;
  }
  return -1;
}

}  // namespace ferry
