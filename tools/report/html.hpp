// A run's report as a page.
#pragma once

#include <string>

#include "tools/report/run_report.hpp"

namespace ferry::report {

// One file that needs nothing else. It holds the JSON of the run in <script id="run">, from which its own
// script draws everything. Its timeline has the first steps only where there are many (steps times ranks
// above 2,048).
std::string to_html(const RunReport& run);

}  // namespace ferry::report
