// A run's report as JSON. What every field means stands in docs/run-report.md.
#pragma once

#include <limits>
#include <nlohmann/json.hpp>

#include "tools/report/run_report.hpp"

namespace ferry::report {

// The version is raised when a field changes its meaning or goes; new fields leave it.
inline constexpr const char* kSchemaName = "ferry.run";
inline constexpr int kSchemaVersion = 1;

// With `most_steps`, the timeline has the first steps only and says so; all figures still come from all
// steps.
nlohmann::ordered_json to_json(const RunReport& run, int most_steps = std::numeric_limits<int>::max());

// Reads what to_json wrote with its whole timeline; derived figures are not read. Times come back rounded to
// a nanosecond. Throws UsageError for another schema, a missing field or table, or a timeline that was cut.
RunReport from_json(const nlohmann::ordered_json& json);

}  // namespace ferry::report
