// Runs functions of the caller so that operations of Ferry can give up on them, and keeps what abandoned
// calls may still use.
#pragma once

#include <sys/types.h>

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry {

// A thread that calls functions of the caller. Runs one call at a time, in the order in which run() was
// called. Several threads may call run() at once.
class CallbackThread {
 public:
  // `abort`: makes a running call throw. It is called at most once, on a thread of its own. Null: a call that
  // is given up is abandoned. Throws SystemError if the thread cannot be started.
  explicit CallbackThread(std::function<void()> abort = nullptr);
  ~CallbackThread();  // no run() may be in progress
  CallbackThread(const CallbackThread&) = delete;
  CallbackThread& operator=(const CallbackThread&) = delete;

  // Blocks until `call` has returned on the thread; not to be called by that thread. Rethrows what it threw.
  // `name`: for error messages; static.
  //
  // While it waits, it calls `check` every 5 ms. `check` throws to give up, and run() throws that. After any
  // exception the thread is failed for good: every later run() throws the same. The abandoned `call` may
  // still run or have left others at work, so it must own all memory that it names, and is never destroyed.
  void run(const char* name, std::function<void()> call, const std::function<void()>& check);

 private:
  struct Call;
  struct State;

  static void serve(const std::shared_ptr<State>& state);
  static void start_abort(const std::shared_ptr<State>& state) noexcept;
  void give_up(std::unique_lock<std::mutex>& lock, Call& call, const std::exception_ptr& reason);

  std::shared_ptr<State> state_;  // shared with the thread, which may outlive this object
  std::thread thread_;
  pid_t process_;
};

// Marks threads that run a function of the caller, so that the function cannot make Ferry wait for itself.
// While it lives, the calling thread runs the caller's function `name` inside an operation of Ferry.
class CallbackScope {
 public:
  explicit CallbackScope(const char* name) : outer_(running_) { running_ = name; }
  ~CallbackScope() { running_ = outer_; }
  CallbackScope(const CallbackScope&) = delete;
  CallbackScope& operator=(const CallbackScope&) = delete;

  // Throws UsageError if the calling thread runs a function of the caller. `operation` is what it attempts.
  static void require_none(const char* operation) {
    if (running_ == nullptr) return;
    throw UsageError(str(running_, " called ", operation,
                         " of Ferry: it runs inside an operation of Ferry and must not start another"));
  }

 private:
  static inline thread_local const char* running_ = nullptr;
  const char* outer_;
};

// Never frees `memory`: an abandoned transport may still write to it. Any thread.
void keep_forever(std::shared_ptr<void> memory);

}  // namespace ferry
