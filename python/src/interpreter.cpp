#include "interpreter.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace nb = nanobind;

namespace ferry::python {

namespace {

// Counts the threads that ask for the GIL; kEnding is added once the interpreter is about to end. A thread
// that has asked before gets the GIL before the interpreter ends.
constexpr int kEnding = 1 << 30;
std::atomic<int> asking = 0;
std::atomic<pid_t> ending_thread = 0;

// Sequentially consistent: either the thread that ends the interpreter sees that another asks, or that one
// sees kEnding.
bool may_ask() {
  if (asking.fetch_add(1) < kEnding || (gettid() == ending_thread && Py_IsInitialized() != 0)) return true;
  asking.fetch_sub(1);
  return false;
}

// At exit, before Python ends threads by force.
void end() {
  ending_thread = gettid();
  asking.fetch_add(kEnding);
  const GilRelease unlocked;
  while (asking.load() != kEnding) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

void watch_for_end_of_python() {
  // Threads that ask do not exist in a forked process.
  pthread_atfork(nullptr, nullptr, [] { asking.store(asking.load() & kEnding); });
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&end));
}

void sleep_until_the_process_ends() noexcept {
  while (true) pause();
}

GilAcquire::GilAcquire() : held_(PyGILState_Check() != 0 || may_ask()) {
  if (!held_) return;
  const bool asks = PyGILState_Check() == 0;
  before_ = survive_end_of_python([] { return PyGILState_Ensure(); });
  if (asks) asking.fetch_sub(1);
}

GilAcquire::~GilAcquire() {
  if (held_) survive_end_of_python([&] { PyGILState_Release(before_); });
}

SharedObject share(nb::object object) {
  return {object.release().ptr(), [](PyObject* last) {
            if (const GilAcquire lock; lock) survive_end_of_python([&] { Py_DECREF(last); });
          }};
}

}  // namespace ferry::python
