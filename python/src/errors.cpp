#include "errors.hpp"
#include "casters.hpp"

#include <string>
#include <utility>
#include <vector>

#include "base/errors.hpp"
#include "ferry/error.hpp"
#include "interpreter.hpp"
#include "interrupt.hpp"

namespace nb = nanobind;

namespace ferry::python {
namespace {

template <class... Field>
void set_error(const char* name, const Error& error, const char* record, const Field&... fields) {
  const nb::module_ errors = nb::module_::import_("ferry.error");
  nb::object exception;
  if constexpr (sizeof...(Field) == 0) {
    exception = errors.attr(name)(error.what());
  } else {
    exception = errors.attr(name)(error.what(), errors.attr(record)(fields...));
  }
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
}

void set_wait_error(const char* name, const Error& error, const WaitRecord& r) {
  set_error(name, error, "WaitRecord", to_string(r.operation), r.call, r.rank, r.peer, r.expected, r.observed,
            r.via, to_string(r.role), r.node);
}

void set_exception(const std::exception_ptr& pointer) {
  try {
    std::rethrow_exception(pointer);
  } catch (const BadIdError& e) {
    set_error("BadIdError", e, "BadId", e.bad.rank, e.bad.token, e.bad.slot, e.bad.id, e.bad.count);
  } catch (const BadSourceError& e) {
    set_error("BadSourceError", e, "BadSource", e.bad.rank, e.bad.index, e.bad.count);
  } catch (const UsageError& e) {
    set_error("UsageError", e, nullptr);
  } catch (const OverflowError& e) {
    const Overflow& o = e.overflow;
    set_error("OverflowError", e, "Overflow", o.rank, o.capacity, o.needed, o.dropped);
  } catch (const TimeoutError& e) {
    set_wait_error("TimeoutError", e, e.record);
  } catch (const PeerLostError& e) {
    set_wait_error("PeerLostError", e, e.record);
  } catch (const SystemError& e) {
    const nb::module_ errors = nb::module_::import_("ferry.error");
    const nb::object exception = errors.attr("SystemError")(e.what(), e.error_number);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  } catch (const UnsupportedError& e) {
    set_error("UnsupportedError", e, nullptr);
  }
}

// Python code makes the exception, and running Python code also runs the handlers of pending signals. If a
// handler raises, for example KeyboardInterrupt, its exception replaces the error.
void translate(const std::exception_ptr& pointer, void*) {
  // No C++ exception: Python ends this thread, whose frames this library may not unwind further.
  if (!pointer) sleep_until_the_process_ends();
  if (restore_interrupt()) return;
  try {
    set_exception(pointer);
  } catch (const PythonException& error) {
    error.restore();
  } catch (nb::python_error& error) {
    error.restore();
  }
}

}  // namespace

std::string text_of(const nb::object& error) {
  auto message = nb::cast<std::string>(nb::str(error));
  if (nb::isinstance(error, nb::module_::import_("ferry.error").attr("Error"))) return message;
  return nb::cast<std::string>(error.type().attr("__name__")) + ": " + message;
}

nb::object exception_object(const std::exception_ptr& pointer) {
  try {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error&) {
      set_exception(pointer);
    } catch (nb::python_error&) {
      throw;
    } catch (const PythonException& error) {
      error.restore();
    } catch (const std::exception& error) {  // mostly values that nanobind could not convert
      set_exception(
          std::make_exception_ptr(UsageError(std::string("arguments that cannot be read: ") + error.what())));
    }
    throw nb::python_error();
  } catch (nb::python_error& error) {
    return nb::borrow(error.value());
  }
}

void raise(const nb::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

namespace {

std::string reworded_text(const std::string& text,
                          const std::vector<std::pair<std::string, std::string>>& words) {
  std::vector<Phrase> phrases;
  for (const auto& [from, to] : words) phrases.push_back({from.c_str(), to.c_str()});
  return reworded(text, phrases);
}

}  // namespace

void register_errors(nb::module_& module) {
  nb::register_exception_translator(translate);
  module.def("_reworded", &reworded_text, nb::arg("text"), nb::arg("words"));
}

}  // namespace ferry::python
