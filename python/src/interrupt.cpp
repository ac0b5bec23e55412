#include "interrupt.hpp"
#include "casters.hpp"

#include <unistd.h>

#include <chrono>
#include <exception>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "group/waiter.hpp"
#include "interpreter.hpp"

namespace nb = nanobind;

namespace ferry::python {

namespace {

thread_local const StopRequest* active_request = nullptr;

// The exception of a signal handler, until the interrupted call passes it to its caller. The GIL guards it. A
// plain pointer, because static objects may be destroyed after the interpreter.
nb::python_error* handler_error = nullptr;

// Python runs signal handlers in the main thread only.
bool is_main_thread() {
  return gettid() == getpid();
}

// Runs pending signal handlers; true if one has raised.
bool is_interrupted() {
  if (!is_main_thread()) return false;
  const GilAcquire locked;
  if (!locked || PyErr_CheckSignals() == 0) return false;
  delete std::exchange(handler_error, new nb::python_error());
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
  if (handler_error == nullptr || !is_main_thread()) return false;
  nb::python_error* const error = std::exchange(handler_error, nullptr);
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

StopRequest::PythonThread::PythonThread(StopRequest& request) : request_(request) {
  request_.threads_.push_back(PyThread_get_thread_ident());
}

StopRequest::PythonThread::~PythonThread() {
  std::erase(request_.threads_, PyThread_get_thread_ident());
}

void StopRequest::raise(PyObject* type) const {
  for (const unsigned long thread : threads_) PyThreadState_SetAsyncExc(thread, type);
}

namespace {

// Shared with the thread that runs it, which may outlive run_interruptibly().
struct Job {
  StopRequest request;
  std::function<void(StopRequest&)> run;
  std::exception_ptr error;  // that `run` has thrown; the waiting caller takes it
  std::promise<void> done;
};

[[noreturn]] void throw_interrupt() {
  const GilAcquire locked;
  restore_interrupt();
  throw nb::python_error();
}

void raise_in_python_code(const StopRequest& request) {
  const GilAcquire locked;
  request.raise(handler_error->type().ptr());
}

}  // namespace

void run_interruptibly(bool starts_threads, std::function<void(StopRequest& request)> run) {
  const auto job = std::make_shared<Job>();
  job->run = std::move(run);
  if (!starts_threads || !is_main_thread()) return job->run(job->request);
  std::future<void> done = job->done.get_future();
  std::thread([job] {
    try {
      job->run(job->request);
    } catch (...) {
      job->error = std::current_exception();
    }
    // This thread releases what it runs while the caller waits, and the caller takes the exception.
    job->run = nullptr;
    job->done.set_value();
  }).detach();
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::seconds kPatience(1);
  bool interrupted = false;
  std::optional<Clock::time_point> leave_at;
  while (done.wait_for(std::chrono::milliseconds(100)) != std::future_status::ready) {
    if (is_interrupted()) {
      job->request.stop();
      if (interrupted) raise_in_python_code(job->request);
      if (interrupted && !leave_at) leave_at = Clock::now() + kPatience;
      interrupted = true;
    }
    if (leave_at && Clock::now() > *leave_at) throw_interrupt();
  }
  const std::exception_ptr error = std::exchange(job->error, nullptr);
  if (interrupted) throw_interrupt();
  if (error) std::rethrow_exception(error);
}

}  // namespace ferry::python
