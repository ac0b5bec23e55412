// Makes a Config from keyword arguments, and enumerators from their names.
#pragma once

#include <optional>
#include <string>

#include "casters.hpp"
#include "ferry/config.hpp"

namespace ferry::python {

// `fallback` is the backend if none is named. Throws UsageError for settings that are missing, unknown, of a
// wrong type, or invalid for any number of ranks.
Config config_of(const nanobind::kwargs& settings, BackendKind fallback = BackendKind::cpu);

// The optional settings with their defaults, as the text of a Python signature.
extern const char* const kOptionalSettings;

Reduction reduction_named(const std::string& name);
BackendKind backend_named(const std::string& name);
EngineKind engine_named(const std::string& name);

}  // namespace ferry::python
