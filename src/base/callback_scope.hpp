// Marks threads that run a function of the caller, so that the function cannot make Ferry wait for itself.
#pragma once

#include <string>

#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry {

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

}  // namespace ferry
