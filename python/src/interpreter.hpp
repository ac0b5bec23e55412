// Taking and releasing the interpreter's lock, the GIL, in threads that may outlive the interpreter.
//
// Python ends a thread by force that asks for the GIL once the interpreter ends (before 3.14, which lets it
// sleep). Frames of C++ do not survive that: the process would abort. So a thread that Python is about to end
// sleeps until the process has ended, and no thread of Ferry's asks for the GIL after the program's last
// step.
#pragma once

#include <cxxabi.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "casters.hpp"
#include "ferry/error.hpp"

namespace ferry::python {

// Makes threads notice the end of the interpreter. Call once, with the GIL.
void watch_for_end_of_python();

[[noreturn]] void sleep_until_the_process_ends() noexcept;

// Calls `use`, which may run Python code or take the GIL. If Python ends the thread there, the thread sleeps
// instead. What `use` itself owns is destroyed without the GIL then, so it should own no Python objects.
template <class Use>
decltype(auto) survive_end_of_python(const Use& use) {
  try {
    return use();
  } catch (abi::__forced_unwind&) {
    sleep_until_the_process_ends();
  }
}

// Releases the GIL for its lifetime.
class GilRelease {
 public:
  GilRelease() : thread_(PyEval_SaveThread()) {}
  ~GilRelease() {
    survive_end_of_python([&] { PyEval_RestoreThread(thread_); });
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* thread_;
};

// Holds the GIL for its lifetime, in any thread, unless the interpreter ends: ask whether it does.
class GilAcquire {
 public:
  GilAcquire();
  ~GilAcquire();
  GilAcquire(const GilAcquire&) = delete;
  GilAcquire& operator=(const GilAcquire&) = delete;

  explicit operator bool() const { return held_; }

 private:
  bool held_;
  PyGILState_STATE before_{};
};

// Shares a Python object with threads that do not hold the GIL. An object whose last owner comes too late for
// the interpreter is leaked.
using SharedObject = std::shared_ptr<PyObject>;
SharedObject share(nanobind::object object);

// An exception of Python in a thread that does not hold the GIL.
class PythonException : public std::runtime_error {
 public:
  explicit PythonException(nanobind::python_error& error)
      : std::runtime_error(error.what()), exception_(share(nanobind::borrow(error.value()))) {}

  // Sets it as the calling thread's Python error. With the GIL.
  void restore() const {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception_.get())), exception_.get());
  }

 private:
  SharedObject exception_;
};

// Calls a Python function in a thread of Ferry's, which holds the GIL.
template <class... Argument>
nanobind::object call_function(const SharedObject& function, const Argument&... arguments) {
  return survive_end_of_python([&] { return nanobind::handle(function.get())(arguments...); });
}

// Calls `use` with the GIL, in a thread of Ferry's. Throws what Python raises as a PythonException.
template <class Use>
decltype(auto) with_gil(const Use& use) {
  const GilAcquire lock;
  if (!lock) throw UnsupportedError("the Python interpreter is ending: it calls no function any more");
  return survive_end_of_python([&]() -> decltype(auto) {
    try {
      return use();
    } catch (nanobind::python_error& error) {
      throw PythonException(error);
    }
  });
}

}  // namespace ferry::python
