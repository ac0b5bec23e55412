// The report of `ferry run --program` and `--overlap` as plain data, and its forms: JSON, a page and a
// timeline. docs/run-report.md describes them.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ferry/program.hpp"
#include "tools/report/run_report.hpp"

namespace ferry::report {

// One form of a program that was run: the plain one, or the one in micro-batches.
struct ProgramRuns {
  Program program{};
  std::vector<double> times_us{};  // [runs] of the slowest rank
  // Whether the steps of each stream ran one after the other, on a GPU. Otherwise all steps did.
  bool on_streams = false;
  // When each step of the last run began, and the last step ended: [ranks][steps + 1], microseconds since the
  // ranks began.
  std::vector<double> begin_us{};

  // From the step's begin to that of the next step, of the same stream with on_streams.
  Span span_of(int rank, std::size_t step) const;
};

struct ProgramReport {
  std::string ferry_version{}, command{}, started_at{};  // as in RunReport
  TraceUse workload{};
  Configuration configuration{};
  Machine machine{};
  std::vector<Check> checks{};
  int micro_batches = 1;  // 1: the plain program was run a second time
  ProgramRuns plain{}, batched{};

  // Which micro-batch a step of `batched` belongs to.
  int batch_of(const ProgramStep& step) const;
  // What `batched` is, in words.
  std::string second_name() const;
};

inline constexpr const char* kProgramSchemaName = "ferry.program_run";
inline constexpr int kProgramSchemaVersion = 1;

nlohmann::ordered_json to_json(const ProgramReport& run);
// One self-contained file without scripts. It holds the JSON in <script type="application/json" id="run">.
std::string to_html(const ProgramReport& run);
// The last runs in Chrome trace format: a process for each rank, with a thread for the plain program and one
// for each micro-batch.
std::string to_trace_events(const ProgramReport& run);

}  // namespace ferry::report
