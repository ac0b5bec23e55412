// Compares a run with an earlier one: the settings that differ, and the figures of both with their ratios.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace ferry::report {

// The field `compared` of the run's report, as docs/run-report.md describes it. Both are reports of to_json.
nlohmann::ordered_json compare(const nlohmann::ordered_json& run, const nlohmann::ordered_json& earlier);

// The comparison as a table for the terminal: `compared` is in `run`.
std::string comparison_table(const nlohmann::ordered_json& run);

}  // namespace ferry::report
