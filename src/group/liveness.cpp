#include "group/liveness.hpp"

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>

#include "base/descriptors.hpp"
#include "base/errors.hpp"
#include "base/process.hpp"
#include "group/control_block.hpp"

namespace ferry {
namespace {

// Registers one lock in the calling thread's robust list while the object lives. It replaces the list of the
// C library, which names robust mutexes that the thread holds: this thread holds none.
class RobustList {
 public:
  explicit RobustList(LivenessLock& lock) {
    syscall(SYS_get_robust_list, 0, &previous_, &previous_bytes_);
    entry_.next = &head_.list;
    head_.list.next = &entry_;
    head_.futex_offset = reinterpret_cast<std::byte*>(&lock.word) - reinterpret_cast<std::byte*>(&entry_);
    syscall(SYS_set_robust_list, &head_, sizeof head_);
  }
  ~RobustList() { syscall(SYS_set_robust_list, previous_, previous_bytes_); }
  RobustList(const RobustList&) = delete;
  RobustList& operator=(const RobustList&) = delete;

 private:
  robust_list_head* previous_ = nullptr;
  std::size_t previous_bytes_ = sizeof(robust_list_head);
  robust_list entry_{};
  robust_list_head head_{};
};

}  // namespace

// Acquire: a peer that sees the mark also sees everything that the dead process stored before.
bool LivenessLock::holder_died() const noexcept {
  return (word.load(std::memory_order_acquire) & FUTEX_OWNER_DIED) != 0;
}

LivenessLockHolder::LivenessLockHolder(LivenessLock& lock) : lock_(lock), process_(getpid()) {
  const auto hold = [](void* holder) -> void* {
    static_cast<LivenessLockHolder*>(holder)->hold();
    return nullptr;
  };
  const ScopedSignalBlock scoped_signal_block;
  const int error = pthread_create(&thread_, nullptr, hold, this);
  if (error != 0) throw system_error("cannot start the thread that holds the rank's liveness lock", error);
  state_.wait(State::starting);
}

LivenessLockHolder::~LivenessLockHolder() {
  if (getpid() != process_) return;  // a forked copy: the thread exists only in the parent
  state_ = State::stopping;
  state_.notify_one();
  pthread_join(thread_, nullptr);
}

void LivenessLockHolder::hold() noexcept {
  const RobustList list(lock_);
  // The kernel marks the lock only if it holds the number of the ending thread.
  lock_.word.store(static_cast<std::uint32_t>(syscall(SYS_gettid)), std::memory_order_release);
  state_ = State::held;
  state_.notify_one();
  state_.wait(State::held);
  lock_.word.store(0, std::memory_order_release);
}

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
