// From what the ranks found to the report of a run.
#pragma once

#include "tools/ferry/run/run_spec.hpp"
#include "tools/ferry/run/shared_results.hpp"
#include "tools/report/run_report.hpp"

namespace ferry::app {

// Reads the board after all ranks have ended. Machine::memcpy_bytes_per_second and started_at are left to the
// caller.
report::RunReport make_report(const Job& job, const Board& board);

}  // namespace ferry::app
