// How ranks notice that the process of a peer has died without leaving the group.
//
// Two sources. The peer's liveness lock is marked as soon as the process is killed. Its pidfd becomes
// readable later, when the last thread is gone, but also covers a process that does not hold its lock yet or
// has released it.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

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

class ControlBlock;

// Also true for a process that has ended and is not reaped yet. Never blocks.
bool has_ended(int process);

class ProcessMonitor {
 public:
  explicit ProcessMonitor(const ControlBlock& control);
  ~ProcessMonitor();
  ProcessMonitor(const ProcessMonitor&) = delete;  // owns file descriptors
  ProcessMonitor& operator=(const ProcessMonitor&) = delete;

  // A dead rank that had not left the group (never `excused`), or -1. A zombie counts, and so does a process
  // that is ending. Never blocks. Skips ranks that are threads of this process.
  int find_dead_rank(int excused = -1);

 private:
  bool open_pidfd(int rank, int this_process);
  bool ended(int rank, int this_process);

  const ControlBlock& control_;
  std::mutex mutex_;         // threads of several lanes may wait at once
  std::vector<int> pidfds_;  // [ranks], -1: not opened
};

}  // namespace ferry
