// Makes a Config from keyword arguments.
#pragma once

#include <optional>
#include <string>

#include "casters.hpp"
#include "ferry/config.hpp"

namespace ferry::python {

// `fallback` is the backend if none is named. Throws UsageError for settings that are missing, unknown, of a
// wrong type, or invalid for any number of ranks.
Config config_of(const nanobind::kwargs& settings);

// The optional settings with their defaults, as the text of a Python signature.
extern const char* const kOptionalSettings;

}  // namespace ferry::python
