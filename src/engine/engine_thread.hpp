// The thread that calls the functions of a custom engine, so that the callers of Ferry can give up on them.
#pragma once

#include <sys/types.h>

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "engine/engine.hpp"
#include "ferry/engine.hpp"

namespace ferry {

// Calls all_to_all_v() of the functions, one call at a time, in the order in which run() was called. Threads
// of several lanes may call run() at once.
class EngineThread {
 public:
  explicit EngineThread(EngineFunctions functions);
  ~EngineThread();  // no run() may be in progress
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  // As Communicator::all_to_all_v. A failure is final for all lanes of this thread.
  void run(int lane, const AllToAllV& transfer, const std::shared_ptr<void>& keep,
           const std::function<void()>& check);

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

}  // namespace ferry
