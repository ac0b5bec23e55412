// Reads the report of an earlier run, which ferry run --compare sets beside the present one.
#pragma once

#include <memory>
#include <string>

#include "tools/report/run_report.hpp"

namespace ferry::app {

// The report in the file that `ferry run --json` wrote. null for an empty path.
// @throws SystemError  the file cannot be read
// @throws UsageError   it holds no report of a run
std::shared_ptr<const report::RunReport> read_earlier_run(const std::string& path);

}  // namespace ferry::app
