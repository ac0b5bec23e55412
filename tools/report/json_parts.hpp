// Parts of JSON that the reports have in common.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
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

}  // namespace ferry::report
