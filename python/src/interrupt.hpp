// Signals, above all Ctrl-C, that arrive while a thread waits without the GIL.
#pragma once

#include <atomic>
#include <functional>

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

 private:
  friend bool this_thread_must_stop_waiting();
  std::atomic<bool> stopped_ = false;
};

// Calls `run`, which starts threads and joins them, without the GIL, and runs signal handlers meanwhile. If a
// handler raises, makes the request, so that threads in its scope end their waits; once `run` has returned,
// throws what the handler raised.
void run_interruptibly(bool starts_threads, const std::function<void(const StopRequest& request)>& run);

}  // namespace ferry::python
