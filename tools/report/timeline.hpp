// A run's timeline in the Chrome trace event format, which Perfetto and chrome://tracing open.
#pragma once

#include <string>

#include "tools/report/run_report.hpp"

namespace ferry::report {

// One process a rank (pid: rank), one thread a phase (tid: 0 dispatch, 1 experts, 2 combine), one complete
// event a span with its step as argument. All steps.
std::string to_trace_events(const RunReport& run);

}  // namespace ferry::report
