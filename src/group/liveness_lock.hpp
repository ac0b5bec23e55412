// A lock in shared memory that the kernel marks when the process that holds it dies, so that peers notice.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>

namespace ferry {

// A robust futex: the kernel sets FUTEX_OWNER_DIED in `word` when the thread that holds the lock ends without
// releasing it. No other thread ever takes the lock, so the mark stays and every peer can see it. Zero bytes
// are a lock that has not been held yet.
struct LivenessLock {
  std::atomic<std::uint32_t> word;

  bool holder_died() const noexcept;
};

// Holds the lock until the object is destroyed or the process dies.
//
// A thread of its own holds the lock, and sleeps. A killed process counts as ended only when its last thread
// is gone, and a thread may take a second or more to leave the GPU driver or to free much memory. A sleeping
// thread ends at once, and the kernel marks the lock at that moment.
class LivenessLockHolder {
 public:
  // Returns when the lock is held. Throws SystemError if the thread cannot be started.
  explicit LivenessLockHolder(LivenessLock& lock);
  ~LivenessLockHolder();
  LivenessLockHolder(const LivenessLockHolder&) = delete;  // the thread holds the object's address
  LivenessLockHolder& operator=(const LivenessLockHolder&) = delete;

 private:
  enum class State : int { starting, held, stopping };

  void hold() noexcept;

  LivenessLock& lock_;
  pid_t process_;
  std::atomic<State> state_ = State::starting;
  pthread_t thread_{};
};

}  // namespace ferry
