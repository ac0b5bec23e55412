// Arguments that must be objects of this module, such as a Plan.
#pragma once

#include <string>

#include "base/text.hpp"
#include "casters.hpp"
#include "ferry/error.hpp"

namespace ferry::python {

// Null if `object` is not a T.
template <class T>
T* cast_or_null(const nanobind::object& object) {
  T* found = nullptr;
  if (nanobind::try_cast(object, found) && found != nullptr) return found;
  PyErr_Clear();
  return nullptr;
}

[[noreturn]] inline void refuse_type(const char* name, const char* expected, const nanobind::object& given) {
  const auto type = nanobind::cast<std::string>(nanobind::type_name(given.type()));
  throw UsageError(str(name, ": expected ", expected, ", got ", type));
}

// Throws UsageError "<name>: expected <expected>, got <type>" if `object` is not a T.
template <class T>
T& cast_argument(const nanobind::object& object, const char* name, const char* expected) {
  if (T* found = cast_or_null<T>(object)) return *found;
  refuse_type(name, expected, object);
}

}  // namespace ferry::python
