// Signals, Ctrl-C above all, that come while a thread waits without the interpreter's lock.
#pragma once

#include <atomic>
#include <functional>

namespace ferry::python {

// From now on a wait of the main thread runs Python's handlers of the signals that come, and ends, with the
// group, when one of them raises.
void heed_signals();

// True if a wait has ended that way: what the handler raised is now the error of the calling thread.
bool restore_interrupt();

// Tells the threads that heed it to give up their waits.
class StopWaiting {
 public:
  void now() { now_ = true; }

  class Heeded {
   public:
    explicit Heeded(const StopWaiting& stop);
    ~Heeded();
    Heeded(const Heeded&) = delete;
    Heeded& operator=(const Heeded&) = delete;
  };

 private:
  friend bool wait_of_this_thread_is_unwanted();
  std::atomic<bool> now_ = false;
};

// Runs `run`, which starts threads and joins them, and meanwhile the handlers of signals, without the
// interpreter's lock. When one raises, threads that heed `stop` end their waits, and what it raised is thrown
// when `run` has ended.
void run_interruptibly(bool starts_threads, const std::function<void(const StopWaiting& stop)>& run);

}  // namespace ferry::python
