// Blocks signals in threads that the library starts, so that the program's own threads receive them.
#pragma once

#include <pthread.h>

#include <csignal>

namespace ferry {

// Blocks all signals in the calling thread while the object lives. Threads started meanwhile inherit the
// mask.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous_);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t previous_{};
};

}  // namespace ferry
