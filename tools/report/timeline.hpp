// Writes a run's timeline in the Chrome trace event format, which Perfetto and chrome://tracing open.
#pragma once

#include <string>

#include "tools/report/run_report.hpp"

namespace ferry::report {

// Every rank is a process (pid: rank), every stage a thread of it (tid: 0 dispatch, 1 experts, 2 combine),
// and every span a complete event with its step as an argument. Has all steps.
std::string to_trace_events(const RunReport& run);

}  // namespace ferry::report
