// A configuration from keyword arguments, and words for the library's enumerations.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string>

#include "ferry/config.hpp"

namespace ferry::python {

// `fallback`: the backend where none is named. Throws UsageError for names that are none and types that do
// not fit.
Config config_of(const nanobind::kwargs& settings, BackendKind fallback = BackendKind::cpu);

Reduction reduction_named(const std::string& name);
BackendKind backend_named(const std::string& name);

}  // namespace ferry::python
