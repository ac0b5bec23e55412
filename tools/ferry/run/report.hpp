// Turns the results of the ranks of a `ferry run` into its report.
#pragma once

#include "ferry/topology.hpp"
#include "tools/ferry/run/run_spec.hpp"
#include "tools/ferry/run/shared_results.hpp"
#include "tools/report/run_report.hpp"

namespace ferry::app {

// Call it after all ranks have ended. The caller fills in RunReport::started_at and the memcpy rate of
// RunReport::machine.
report::RunReport make_report(const RunSpec& spec, const Topology& topology, const SharedResults& results);

}  // namespace ferry::app
