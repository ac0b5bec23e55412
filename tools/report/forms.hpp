// The forms of a run's report: JSON, a table, a timeline and a page. docs/run-report.md describes every
// field.
#pragma once

#include <nlohmann/json.hpp>

#include <limits>
#include <string>

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

// A table for the terminal: ASCII text, with escape sequences only if it is `coloured`. Lines have at most 80
// columns unless a name is longer.
std::string to_table(const RunReport& run, bool coloured = false);

// The timeline in the Chrome trace event format, which Perfetto and chrome://tracing open. Every rank is a
// process (pid: rank), every stage a thread of it (tid: 0 dispatch, 1 experts, 2 combine), and every span a
// complete event with its step as an argument. Has all steps.
std::string to_trace_events(const RunReport& run);

// An HTML page, one self-contained file. It holds the run's JSON in <script id="run">, from which its script
// draws everything. If steps times ranks exceed 2,048, its timeline has only the first steps.
std::string to_html(const RunReport& run);

}  // namespace ferry::report
