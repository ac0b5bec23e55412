// Objects with threads, mappings or peers belong to the process that made them; a
// forked child must not use them.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <utility>

#include "base/text.hpp"
#include "casters.hpp"
#include "ferry/error.hpp"

namespace ferry::python {

// getpid() without a system call, because every call of the module asks several times.
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

// Destruction may wait for peers or devices, so it runs without the GIL. A forked child does not destroy the
// object: its threads and mappings are the parent's.
template <class T, class... Argument>
std::shared_ptr<T> make_process_owned(Argument&&... arguments) {
  return std::shared_ptr<T>(new T{std::forward<Argument>(arguments)...},
                            [process = this_process()](T* object) {
                              if (this_process() != process) return;
                              if (PyGILState_Check() == 0) {
                                delete object;
                                return;
                              }
                              const nanobind::gil_scoped_release unlocked;
                              delete object;
                            });
}

}  // namespace ferry::python
