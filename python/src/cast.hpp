// Arguments that must be objects of this module, such as a Plan, and errors of Python code that reads
// arguments.
#pragma once

#include <optional>
#include <string>

#include "base/text.hpp"
#include "casters.hpp"
#include "ferry/error.hpp"

namespace ferry::python {

// Clears the error of Python code that has failed, for a caller that goes on or raises an error of its own.
// Throws what is no Exception: above all KeyboardInterrupt must reach the program.
inline void clear_error() {
  if (PyErr_Occurred() != nullptr && PyErr_ExceptionMatches(PyExc_Exception) == 0)
    throw nanobind::python_error();
  PyErr_Clear();
}

// Raises UsageError from `cause`, an error of Python code; throws that itself if it is no Exception.
[[noreturn]] inline void refuse_from(nanobind::python_error& cause, const std::string& text) {
  if (!cause.matches(PyExc_Exception)) throw cause;
  const nanobind::object type = nanobind::module_::import_("ferry.error").attr("UsageError");
  nanobind::raise_from(cause, type.ptr(), "%s", text.c_str());
  throw nanobind::python_error();
}

// The attribute, or an invalid object if there is none.
inline nanobind::object attribute_of(nanobind::handle object, const char* name) {
  nanobind::object found = nanobind::steal(PyObject_GetAttrString(object.ptr(), name));
  if (found.is_valid()) return found;
  if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw nanobind::python_error();
  PyErr_Clear();
  return found;
}

// Null if `object` is not a T.
template <class T>
T* cast_or_null(const nanobind::object& object) {
  T* found = nullptr;
  if (nanobind::try_cast(object, found) && found != nullptr) return found;
  clear_error();
  return nullptr;
}

[[noreturn]] inline void refuse_type(const char* name, const char* expected, const nanobind::object& given) {
  const auto type = nanobind::cast<std::string>(nanobind::type_name(given.type()));
  throw UsageError(str(name, ": expected ", expected, ", got ", type));
}

// The text in `given`; nothing for None. Throws UsageError for other objects.
inline std::optional<std::string> text_in(const nanobind::object& given, const char* name) {
  if (given.is_none()) return std::nullopt;
  std::string text;
  if (!nanobind::try_cast(given, text)) refuse_type(name, "a string", given);
  return text;
}

// Throws UsageError "<name>: expected <expected>, got <type>" if `object` is not a T.
template <class T>
T& cast_argument(const nanobind::object& object, const char* name, const char* expected) {
  if (T* found = cast_or_null<T>(object)) return *found;
  refuse_type(name, expected, object);
}

}  // namespace ferry::python
