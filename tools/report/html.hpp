// Writes a run's report as an HTML page.
#pragma once

#include <string>

#include "tools/report/run_report.hpp"

namespace ferry::report {

// One self-contained file. It holds the run's JSON in <script id="run">, from which its script draws
// everything. If steps times ranks exceed 2,048, its timeline has only the first steps.
std::string to_html(const RunReport& run);

}  // namespace ferry::report
