// The signals that `ferry launch` passes on to its ranks.
#pragma once

#include <csignal>

#include "base/descriptors.hpp"

namespace ferry::app {

// Blocks the signals that ask a job to end, stop or go on, and SIGCHLD, so that they can be read instead. A
// signal that the caller ignores, as nohup does, stays ignored. Processes that this one forks read theirs
// from a copy.
class Signals {
 public:
  Signals();
  ~Signals() { restore(); }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  int descriptor() const { return file_.number(); }  // readable once a signal has come

  int wait() const;  // blocks until a signal comes, and returns it
  int next() const;  // takes a signal that has come; 0: none has

  // Blocks what was blocked before.
  void restore() const { pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }

 private:
  sigset_t set_{}, previous_{};
  FileDescriptor file_;
};

}  // namespace ferry::app
