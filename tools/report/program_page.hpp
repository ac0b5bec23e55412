// Writes the HTML page of a run of programs.
#pragma once

#include <string>

#include "tools/report/program_report.hpp"

namespace ferry::report {

// `json`: the run's JSON, as text that may stand in a script element.
std::string program_page(const ProgramReport& run, const std::string& json);

}  // namespace ferry::report
