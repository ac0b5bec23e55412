// A configuration from keyword arguments, and words for the library's enumerations.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string>

#include "ferry/config.hpp"

namespace ferry::python {

// `fallback`: the backend where none is named. Throws UsageError for what is missing, for names that are
// none, types that do not fit, and values that fit no number of ranks.
Config config_of(const nanobind::kwargs& settings, BackendKind fallback = BackendKind::cpu);

// The settings that have defaults, as parameters of a Python function.
extern const char* const kOptionalSettings;

Reduction reduction_named(const std::string& name);
BackendKind backend_named(const std::string& name);

}  // namespace ferry::python
