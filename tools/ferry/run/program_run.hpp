// `ferry run --program` and `--overlap`: runs a program over a trace, as it is and in micro-batches.
#pragma once

#include <string>
#include <vector>

#include "base/mapping.hpp"
#include "ferry/group.hpp"
#include "ferry/program.hpp"
#include "tools/ferry/common/dispatch_check.hpp"
#include "tools/ferry/run/run_spec.hpp"
#include "tools/report/program_report.hpp"

namespace ferry::app {

// The program in a file.
// @throws UsageError   it holds no program, or is no regular file
// @throws SystemError  it cannot be read
Program read_program(const std::string& path);

// The program of the options: that of the file, or a layer of dispatch, experts and combine.
// @throws UsageError  the file cannot be read, or holds no program that runs here
Program program_of(const RunSpec& spec);

// Results of the ranks of a run of programs, in memory that they share with the process that started them.
// Rank 0 writes it.
class ProgramResults {
 public:
  struct Summary {
    CheckCounter sums;     // plain program with scaling experts; only of the layer that needs no file
    CheckCounter batches;  // bytes in micro-batches, compared with those of the plain program
  };

  // `plain`, `batched`: numbers of their steps.
  ProgramResults(int ranks, int runs, std::size_t plain, std::size_t batched);

  Summary& summary() const;
  // Microseconds of the slowest rank: [runs] of the plain program, then of the one in micro-batches.
  double* times() const;
  // When each step of the last run began, and the last one ended, in microseconds: [ranks][plain + 1 +
  // batched + 1].
  double* step_times() const;

  std::size_t times_of_rank() const { return plain_ + batched_ + 2; }

 private:
  int ranks_, runs_;
  std::size_t plain_, batched_;
  Mapping memory_;
};

// Collective: one rank's part. First every step of the trace with scaling experts, checked, then timed with
// SwiGLU experts, plain and in micro-batches in turn.
void run_programs(const Rank& rank, const RunSpec& spec, const Program& plain, const Program& batched,
                  const ProgramResults& results);

// The table that `ferry run` prints.
std::string program_table(const report::ProgramReport& run, bool coloured);
// Call it after all ranks have ended. The caller fills in started_at.
report::ProgramReport make_program_report(const RunSpec& spec, const Topology& topology, const Program& plain,
                                          const Program& batched, const ProgramResults& results);

}  // namespace ferry::app
