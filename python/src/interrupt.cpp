#include "interrupt.hpp"

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <future>
#include <utility>

#include "group/waiter.hpp"

namespace nb = nanobind;

namespace ferry::python {

namespace {

thread_local const StopRequest* active_request = nullptr;

// What a signal handler raised, until the interrupted call passes it to its caller. The GIL guards it. A
// plain pointer, because static objects may be destroyed after the interpreter.
nb::python_error* raised = nullptr;

// Python runs signal handlers in the main thread only.
bool is_main_thread() {
  return gettid() == getpid();
}

// Runs pending signal handlers; true if one has raised.
bool is_interrupted() {
  if (!is_main_thread() || Py_IsInitialized() == 0) return false;
  const nb::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() == 0) return false;
  delete std::exchange(raised, new nb::python_error());
  // A wait in a destructor has no caller to raise to. This pending call raises at Python's next step.
  Py_AddPendingCall([](void*) { return restore_interrupt() ? -1 : 0; }, nullptr);
  return true;
}

}  // namespace

bool this_thread_must_stop_waiting() {
  return (active_request != nullptr && active_request->stopped_) || is_interrupted();
}

void install_signal_handling() {
  interrupt_requested = this_thread_must_stop_waiting;
}

bool restore_interrupt() {
  if (raised == nullptr || !is_main_thread()) return false;
  nb::python_error* const error = std::exchange(raised, nullptr);
  error->restore();
  delete error;
  return true;
}

StopRequest::Scope::Scope(const StopRequest& request) {
  active_request = &request;
}

StopRequest::Scope::~Scope() {
  active_request = nullptr;
}

void run_interruptibly(bool starts_threads, const std::function<void(const StopRequest& request)>& run) {
  StopRequest request;
  if (!starts_threads || !is_main_thread()) return run(request);
  auto done = std::async(std::launch::async, [&] { run(request); });
  while (done.wait_for(std::chrono::milliseconds(100)) != std::future_status::ready) {
    if (is_interrupted()) request.stop();
  }
  std::exception_ptr error;
  try {
    done.get();
  } catch (...) {
    error = std::current_exception();
  }
  const nb::gil_scoped_acquire locked;
  if (restore_interrupt()) throw nb::python_error();
  if (error) std::rethrow_exception(error);
}

}  // namespace ferry::python
