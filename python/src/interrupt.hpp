// Signals, above all Ctrl-C, that arrive while a thread waits without the GIL.
#pragma once

#include <atomic>
#include <functional>
#include <vector>

#include "casters.hpp"

namespace ferry::python {

// Makes waits of the main thread run Python's signal handlers. If a handler raises, the wait
// ends, and the group with it.
void install_signal_handling();

// If a wait ended that way, sets the handler's exception as the calling thread's
// Python error and returns true.
bool restore_interrupt();

// Asks threads to give up their waits.
class StopRequest {
 public:
  void stop() { stopped_ = true; }

  // Makes the calling thread obey a request for the scope's lifetime.
  class Scope {
   public:
    explicit Scope(const StopRequest& request);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };

  // Marks the calling thread as one that runs Python code. Construct and destroy it with the GIL.
  class PythonThread {
   public:
    explicit PythonThread(StopRequest& request);
    ~PythonThread();
    PythonThread(const PythonThread&) = delete;
    PythonThread& operator=(const PythonThread&) = delete;

   private:
    StopRequest& request_;
  };

  // Raises an exception of this class in those threads, at their next step of Python code. With the GIL.
  void raise(PyObject* type) const;

 private:
  friend bool this_thread_must_stop_waiting();
  std::atomic<bool> stopped_ = false;
  std::vector<unsigned long> threads_;  // that run Python code; the GIL guards it
};

// Calls `run`, which starts threads and joins them, without the GIL, and runs signal handlers meanwhile. If a
// handler raises, makes the request, so that threads in its scope end their waits; once `run` has returned,
// throws what the handler raised. If a handler raises once more, also raises in the Python code of the
// threads; and if `run` has not returned a second later, because a thread is inside a call that does not
// return, leaves the threads behind and throws. So `run` owns all that it uses.
void run_interruptibly(bool starts_threads, std::function<void(StopRequest& request)> run);

}  // namespace ferry::python
