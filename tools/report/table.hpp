// A run's report for the terminal.
#pragma once

#include <string>

#include "tools/report/run_report.hpp"

namespace ferry::report {

// Plain text, at most 80 columns where names are not longer, lines ending in '\n', no escape sequences.
std::string to_table(const RunReport& run);

}  // namespace ferry::report
