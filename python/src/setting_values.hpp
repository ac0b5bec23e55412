// Reads the values of settings from Python objects. A value of a wrong type is a UsageError that names the
// setting and the value.
#pragma once

#include <limits>
#include <string>

#include "base/text.hpp"
#include "cast.hpp"
#include "casters.hpp"
#include "ferry/error.hpp"

namespace ferry::python {

[[noreturn]] inline void refuse_value(const std::string& key, const std::string& expected,
                                      nanobind::handle value) {
  clear_error();
  throw UsageError(str(key, ": expected ", expected, ", got ",
                       nanobind::cast<std::string>(nanobind::repr(nanobind::borrow(value)))));
}

template <class T>
T value_of(const std::string& key, nanobind::handle value, const char* expected) {
  T read{};
  if (nanobind::try_cast(nanobind::borrow(value), read, false)) return read;
  refuse_value(key, expected, value);
}

// Accepts NumPy's integers too, which are not int but convert by __index__.
template <class T>
T integer_of(const std::string& key, nanobind::handle value) {
  if (PyBool_Check(value.ptr()) || PyIndex_Check(value.ptr()) == 0) refuse_value(key, "an integer", value);
  const nanobind::object index = nanobind::steal(PyNumber_Index(value.ptr()));
  if (!index.is_valid()) refuse_value(key, "an integer", value);
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  constexpr auto kLeast = std::numeric_limits<T>::min(), kMost = std::numeric_limits<T>::max();
  if (overflow != 0 || number < kLeast || number > kMost) {
    refuse_value(key, str("an integer from ", kLeast, " to ", kMost), value);
  }
  return static_cast<T>(number);
}

inline int int_of(const std::string& key, nanobind::handle value) {
  return integer_of<int>(key, value);
}
inline bool bool_of(const std::string& key, nanobind::handle value) {
  return value_of<bool>(key, value, "True or False");
}
inline std::string text_value(const std::string& key, nanobind::handle value) {
  return value_of<std::string>(key, value, "a string");
}

inline double seconds_of(const std::string& key, nanobind::handle value) {
  constexpr const char* kExpected = "a number of seconds";
  if (PyBool_Check(value.ptr()) || PyNumber_Check(value.ptr()) == 0) refuse_value(key, kExpected, value);
  const double seconds = PyFloat_AsDouble(value.ptr());
  if (PyErr_Occurred() != nullptr) refuse_value(key, kExpected, value);
  return seconds;
}

}  // namespace ferry::python
