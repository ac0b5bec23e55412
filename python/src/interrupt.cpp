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

thread_local const StopWaiting* heeded = nullptr;

// Guarded by the interpreter's lock: what a handler raised, until the call that waited hands it to its
// caller. A plain pointer, as the interpreter may be gone when static objects are destroyed.
nb::python_error* raised = nullptr;

// Python runs handlers there only.
bool is_main_thread() {
  return gettid() == getpid();
}

// Runs handlers; true if one has raised.
bool is_interrupted() {
  if (!is_main_thread() || Py_IsInitialized() == 0) return false;
  const nb::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() == 0) return false;
  delete std::exchange(raised, new nb::python_error());
  // Where the wait's error stays inside, as in a destructor, Python raises it with its next step.
  Py_AddPendingCall([](void*) { return restore_interrupt() ? -1 : 0; }, nullptr);
  return true;
}

}  // namespace

bool wait_of_this_thread_is_unwanted() {
  return (heeded != nullptr && heeded->now_) || is_interrupted();
}

void heed_signals() {
  wait_is_unwanted = wait_of_this_thread_is_unwanted;
}

bool restore_interrupt() {
  if (raised == nullptr || !is_main_thread()) return false;
  nb::python_error* const error = std::exchange(raised, nullptr);
  error->restore();
  delete error;
  return true;
}

StopWaiting::Heeded::Heeded(const StopWaiting& stop) {
  heeded = &stop;
}

StopWaiting::Heeded::~Heeded() {
  heeded = nullptr;
}

void run_interruptibly(bool starts_threads, const std::function<void(const StopWaiting& stop)>& run) {
  StopWaiting stop;
  if (!starts_threads || !is_main_thread()) return run(stop);
  auto ended = std::async(std::launch::async, [&] { run(stop); });
  while (ended.wait_for(std::chrono::milliseconds(100)) != std::future_status::ready) {
    if (is_interrupted()) stop.now();
  }
  std::exception_ptr error;
  try {
    ended.get();
  } catch (...) {
    error = std::current_exception();
  }
  const nb::gil_scoped_acquire locked;
  if (restore_interrupt()) throw nb::python_error();
  if (error) std::rethrow_exception(error);
}

}  // namespace ferry::python
