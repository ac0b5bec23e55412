// Translates C++ errors to the Python exceptions of ferry.error, with their records.
#pragma once

#include <exception>

#include "casters.hpp"

namespace ferry::python {

// Registers the translation for every function of the module.
void register_errors();

// The Python exception for a C++ exception, for code that passes it on as an object.
nanobind::object exception_object(const std::exception_ptr& pointer);

}  // namespace ferry::python
