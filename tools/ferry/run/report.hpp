// Turns the results of the ranks of a `ferry run` into its report.
#pragma once

#include <memory>
#include <string>

#include "ferry/topology.hpp"
#include "tools/ferry/common/dispatch_check.hpp"
#include "tools/ferry/run/run_spec.hpp"
#include "tools/ferry/run/shared_results.hpp"
#include "tools/report/run_report.hpp"

namespace ferry::app {

// Call it after all ranks have ended. The caller fills in RunReport::started_at and the memcpy rate of
// RunReport::machine.
report::RunReport make_report(const RunSpec& spec, const Topology& topology, const SharedResults& results);

// Parts that a report of programs has too.
report::TraceUse workload_of(const RunSpec& spec);
report::Configuration configuration_of(const RunSpec& spec, const Topology& topology);
report::Check check_of(const char* name, const CheckCounter& counter, const std::string& description);

// The report of an earlier run, which ferry run --compare sets beside the present one, from the file that
// `ferry run --json` wrote. null for an empty path.
// @throws UsageError  the file cannot be read, or holds no report of a run
std::shared_ptr<const report::RunReport> read_earlier_run(const std::string& path);

}  // namespace ferry::app
