// What the reports of runs and of programs have in common: parts of JSON, the files of the page, comparisons.
#pragma once

#include <nlohmann/json.hpp>

#include <string>
#include <string_view>
#include <vector>

#include "tools/report/run_report.hpp"

namespace ferry::report {

double to_nanosecond(double us);
nlohmann::ordered_json json_of(const TraceUse& workload);
nlohmann::ordered_json json_of(const Configuration& configuration);
nlohmann::ordered_json json_of(const Machine& machine);
nlohmann::ordered_json json_of(const std::vector<Check>& checks);

// JSON as text that may stand in a script element.
std::string for_script(std::string json);

// The files of page/, embedded at configuration time.
extern const std::string_view kPageHtml;  // with the marks {{css}}, {{js}} and {{json}}
extern const std::string_view kPageCss;
extern const std::string_view kPageJs;

// Compares a run with an earlier one: the settings that differ, and the figures of both with their ratios.
// The field `compared` of the run's report, as docs/run-report.md describes it. Both are reports of to_json.
nlohmann::ordered_json compare(const nlohmann::ordered_json& run, const nlohmann::ordered_json& earlier);

// The comparison as a table for the terminal: `compared` is in `run`.
std::string comparison_table(const nlohmann::ordered_json& run, bool coloured);

}  // namespace ferry::report
