// Blocks signals in threads that the library starts, so that the program's own threads receive them.
#pragma once

#include <pthread.h>

#include <csignal>

namespace ferry {

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

}  // namespace ferry
