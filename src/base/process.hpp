// The process and its threads: identity after fork(), signal masks, pauses in loops that wait.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <csignal>

#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry {

// getpid() without a system call, for code that asks in every call.
inline int this_process() {
  static std::atomic<int> process{(pthread_atfork(nullptr, nullptr, [] { process = getpid(); }), getpid())};
  return process.load(std::memory_order_relaxed);
}

// Objects with threads, mappings or peers belong to the process that made them; a forked child must not use
// them. Throws UsageError in a process that was forked from the one that made `what`.
inline void require_own_process(const char* what, int process) {
  if (this_process() == process) return;
  throw UsageError(str(what, " was made by process ", process, " and this is process ", this_process(),
                       ", forked from it: make a new group after the fork"));
}

// For threads that the library starts, so that the program's own threads receive the signals.
// Blocks all signals in the calling thread while the object lives. Threads started meanwhile inherit the
// mask.
class ScopedSignalBlock {
 public:
  ScopedSignalBlock() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous_);
  }
  ~ScopedSignalBlock() { pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }
  ScopedSignalBlock(const ScopedSignalBlock&) = delete;
  ScopedSignalBlock& operator=(const ScopedSignalBlock&) = delete;

 private:
  sigset_t previous_{};
};

// Lets the processor save power, or run the other thread of its core, for some cycles.
inline void pause_processor() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace ferry
