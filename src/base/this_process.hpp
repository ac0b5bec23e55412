// Objects with threads, mappings or peers belong to the process that made them; a forked child must not use
// them.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <atomic>

#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry {

// getpid() without a system call, for code that asks in every call.
inline int this_process() {
  static std::atomic<int> process{(pthread_atfork(nullptr, nullptr, [] { process = getpid(); }), getpid())};
  return process.load(std::memory_order_relaxed);
}

// Throws UsageError in a process that was forked from the one that made `what`.
inline void require_own_process(const char* what, int process) {
  if (this_process() == process) return;
  throw UsageError(str(what, " was made by process ", process, " and this is process ", this_process(),
                       ", forked from it: make a new group after the fork"));
}

}  // namespace ferry
