#include "group/liveness_lock.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>

#include "base/errors.hpp"
#include "base/process.hpp"

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

}  // namespace ferry
