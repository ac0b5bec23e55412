// Writes a run's report as a table for the terminal.
#pragma once

#include <string>

#include "tools/report/run_report.hpp"

namespace ferry::report {

// ASCII text without escape sequences. Lines have at most 80 columns unless a name is longer.
std::string to_table(const RunReport& run);

}  // namespace ferry::report
