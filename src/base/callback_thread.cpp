#include "base/callback_thread.hpp"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <system_error>
#include <utility>
#include <vector>

#include "base/errors.hpp"
#include "base/process.hpp"

namespace ferry {
namespace {

constexpr std::chrono::milliseconds kCallbackCheckPeriod(5);

// How long a running call may take to return after Ferry has given it up, before its thread is abandoned.
constexpr std::chrono::milliseconds kAbortGrace(500);

}  // namespace

struct CallbackThread::Call {
  const char* name;
  std::function<void()> function;
  bool done = false;
  std::exception_ptr error = nullptr;
};

struct CallbackThread::State {
  explicit State(std::function<void()> given) : abort(std::move(given)) {}

  std::function<void()> abort;
  std::mutex mutex;
  std::condition_variable changed;          // notified when any member below changes
  std::deque<std::shared_ptr<Call>> queue;  // calls that have not started
  std::shared_ptr<Call> running;
  std::exception_ptr failure;  // the first error; final
  bool stopping = false;
};

CallbackThread::CallbackThread(std::function<void()> abort)
    : state_(std::make_shared<State>(std::move(abort))), process_(getpid()) {
  const ScopedSignalBlock no_signals;
  try {
    thread_ = std::thread([state = state_] { serve(state); });
  } catch (const std::system_error& error) {
    throw system_error("cannot start the thread that calls the functions of the caller",
                       error.code().value());
  }
}

CallbackThread::~CallbackThread() {
  if (getpid() != process_) {  // a forked copy: the thread exists only in the parent
    thread_.detach();
    return;
  }
  bool abandoned = false;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    abandoned = state_->running != nullptr;  // given up, and still inside the caller's function
  }
  state_->changed.notify_all();
  abandoned ? thread_.detach() : thread_.join();
}

void CallbackThread::serve(const std::shared_ptr<State>& state) {
  std::unique_lock lock(state->mutex);
  while (true) {
    state->changed.wait(lock, [&] { return state->stopping || state->failure || !state->queue.empty(); });
    if (state->failure || state->queue.empty()) return;
    const std::shared_ptr<Call> call = state->queue.front();
    state->queue.pop_front();
    state->running = call;
    lock.unlock();
    std::exception_ptr error = nullptr;
    try {
      const CallbackScope scope(call->name);
      call->function();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (!error && !state->failure) {
      // Destroyed before run() returns, so that the caller's objects do not outlive it; without the lock,
      // because objects of other languages may need locks of their own.
      std::function<void()> finished = std::move(call->function);
      lock.unlock();
      finished = nullptr;
      lock.lock();
    }
    call->error = error;
    call->done = true;
    state->running = nullptr;
    if (error && !state->failure) state->failure = error;
    state->changed.notify_all();
  }
}

// Calls abort() on a thread of its own, because it is the caller's function and may block too. Nothing is
// reported: whether it worked shows in the running call.
void CallbackThread::start_abort(const std::shared_ptr<State>& state) noexcept {
  const ScopedSignalBlock no_signals;
  try {
    std::thread([state] {
      const CallbackScope scope("the caller's function abort");
      try {
        state->abort();
      } catch (...) {
        return;
      }
    }).detach();
  } catch (const std::system_error&) {
    return;
  }
}

void CallbackThread::run(const char* name, std::function<void()> function,
                         const std::function<void()>& check) {
  const auto call = std::make_shared<Call>(Call{name, std::move(function)});
  std::unique_lock lock(state_->mutex);
  if (state_->failure) std::rethrow_exception(state_->failure);
  state_->queue.push_back(call);
  state_->changed.notify_all();

  std::exception_ptr reason;
  while (!call->done && !reason) {
    state_->changed.wait_for(lock, kCallbackCheckPeriod, [&] { return call->done || state_->failure; });
    if (call->done) break;
    reason = state_->failure;
    if (reason) break;
    lock.unlock();
    try {
      check();
    } catch (...) {
      reason = std::current_exception();
    }
    lock.lock();
  }
  // A call that has returned while the check gave up has done its work.
  if (call->done) reason = call->error;
  if (!reason) return;
  keep_forever(call);
  give_up(lock, *call, reason);
  std::rethrow_exception(reason);
}

// Fails the thread with `reason`, and makes the call return if it is running.
void CallbackThread::give_up(std::unique_lock<std::mutex>& lock, Call& call,
                             const std::exception_ptr& reason) {
  if (!state_->failure) state_->failure = reason;
  std::erase_if(state_->queue, [&](const std::shared_ptr<Call>& queued) { return queued.get() == &call; });
  state_->changed.notify_all();
  if (state_->running.get() != &call || !state_->abort) return;
  start_abort(state_);
  state_->changed.wait_for(lock, kAbortGrace, [&] { return call.done; });
}

void keep_forever(std::shared_ptr<void> memory) {
  static std::mutex mutex;
  // Not destroyed at exit either: abandoned threads run until the process ends.
  static auto* const kept = new std::vector<std::shared_ptr<void>>;
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(memory));
}

}  // namespace ferry
