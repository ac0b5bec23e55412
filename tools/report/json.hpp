// Writes and reads a run's report as JSON. docs/run-report.md describes every field.
#pragma once

#include <limits>
#include <nlohmann/json.hpp>

#include "tools/report/run_report.hpp"

namespace ferry::report {

// The version is raised when a field changes its name or meaning or is removed, and not for a new field.
inline constexpr const char* kSchemaName = "ferry.run";
inline constexpr int kSchemaVersion = 2;

// `most_steps` limits the timeline to the first steps, and timeline.steps says so. All figures still come
// from all steps.
nlohmann::ordered_json to_json(const RunReport& run, int most_steps = std::numeric_limits<int>::max());

// Reads a report with a complete timeline, of this version or of version 1. Derived figures and the
// comparison with an earlier run are not read; times are rounded to a nanosecond.
// @throws UsageError  another schema or version, a missing field or array, or a shortened timeline
RunReport from_json(const nlohmann::ordered_json& json);

}  // namespace ferry::report
