// Translates C++ errors to the Python exceptions of ferry.error, with their records.
#pragma once

#include <exception>
#include <string>

#include "casters.hpp"

namespace ferry::python {

// Registers the translation for every function of the module.
void register_errors(nanobind::module_& module);

// What an exception object says: of an error of Ferry its message, of another its type and message.
std::string text_of(const nanobind::object& error);
inline std::string text_of(const nanobind::python_error& error) {
  return text_of(nanobind::borrow(error.value()));
}

// The Python exception for a C++ exception, for code that passes it on as an object.
nanobind::object exception_object(const std::exception_ptr& pointer);

// Raises an exception object.
[[noreturn]] void raise(const nanobind::object& error);

}  // namespace ferry::python
