// A lock in shared memory by whose end others notice that its owner's process has ended.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>

namespace ferry {

// A robust futex: the system marks it when the thread that holds it ends without having let go. Nobody takes
// it over, so the mark stays, for everyone to see. Zero bytes are a lock that nobody has held yet.
struct RobustLock {
  std::atomic<std::uint32_t> word;

  bool owner_died() const noexcept;
};

// Holds the lock as long as the object lives and its process does.
//
// By a thread that does nothing else. A killed process counts as ended when the last of its threads is gone,
// and that one may be in the GPU driver, which takes a second and more to clear up, or free much memory. A
// thread that sleeps ends at once, and with it the lock is marked.
class RobustLockOwner {
 public:
  // Returns when the lock is held. SystemError if no thread can be had.
  explicit RobustLockOwner(RobustLock& lock);
  ~RobustLockOwner();
  RobustLockOwner(const RobustLockOwner&) = delete;  // the thread has its address
  RobustLockOwner& operator=(const RobustLockOwner&) = delete;

 private:
  enum class Stage : int { starting, held, ending };

  void run() noexcept;

  RobustLock& lock_;
  pid_t process_;
  std::atomic<Stage> stage_ = Stage::starting;
  pthread_t thread_{};
};

}  // namespace ferry
