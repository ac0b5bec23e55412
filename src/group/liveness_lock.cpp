#include "group/liveness_lock.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>

#include "base/system_error.hpp"
#include "group/no_signals.hpp"

namespace ferry {

namespace {

// Tells the system of the one lock that the calling thread holds, as long as the object lives. In place of
// the C library's list, which names the locks of its own mutexes: the thread holds none.
class RobustList {
 public:
  explicit RobustList(RobustLock& lock) {
    syscall(SYS_get_robust_list, 0, &libraries_, &bytes_);
    entry_.next = &head_.list;
    head_.list.next = &entry_;
    head_.futex_offset = reinterpret_cast<std::byte*>(&lock.word) - reinterpret_cast<std::byte*>(&entry_);
    syscall(SYS_set_robust_list, &head_, sizeof head_);
  }
  ~RobustList() { syscall(SYS_set_robust_list, libraries_, bytes_); }
  RobustList(const RobustList&) = delete;
  RobustList& operator=(const RobustList&) = delete;

 private:
  robust_list_head* libraries_ = nullptr;
  std::size_t bytes_ = sizeof(robust_list_head);
  robust_list entry_{};
  robust_list_head head_{};
};

}  // namespace

// Acquire: what the process had stored before it ended is seen with the mark.
bool RobustLock::owner_died() const noexcept {
  return (word.load(std::memory_order_acquire) & FUTEX_OWNER_DIED) != 0;
}

RobustLockOwner::RobustLockOwner(RobustLock& lock) : lock_(lock), process_(getpid()) {
  const auto run = [](void* owner) -> void* {
    static_cast<RobustLockOwner*>(owner)->run();
    return nullptr;
  };
  const NoSignals no_signals;
  const int error = pthread_create(&thread_, nullptr, run, this);
  if (error != 0)
    throw system_error("cannot start the thread by whose end peers notice this process's", error);
  stage_.wait(Stage::starting);
}

RobustLockOwner::~RobustLockOwner() {
  if (getpid() != process_) return;  // a forked one: the thread is its parent's
  stage_ = Stage::ending;
  stage_.notify_one();
  pthread_join(thread_, nullptr);
}

void RobustLockOwner::run() noexcept {
  const RobustList list(lock_);
  // The system marks the lock only if it holds the number of the thread that ends.
  lock_.word.store(static_cast<std::uint32_t>(syscall(SYS_gettid)), std::memory_order_release);
  stage_ = Stage::held;
  stage_.notify_one();
  stage_.wait(Stage::held);
  lock_.word.store(0, std::memory_order_release);
}

}  // namespace ferry
