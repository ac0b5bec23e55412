// ferry run: a routing trace through dispatch, experts and combine, every number checked.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <memory>

#include "ferry/group.hpp"
#include "tools/ferry/commands/commands.hpp"
#include "tools/ferry/common/arguments.hpp"
#include "tools/ferry/common/machine.hpp"
#include "tools/ferry/common/memcpy_rate.hpp"
#include "tools/ferry/common/output.hpp"
#include "tools/ferry/common/recorded_traces.hpp"
#include "tools/ferry/run/multiply.hpp"
#include "tools/ferry/run/report.hpp"
#include "tools/ferry/run/run_options.hpp"
#include "tools/ferry/run/run_spec.hpp"
#include "tools/ferry/run/runner.hpp"
#include "tools/ferry/run/shared_results.hpp"
#include "tools/report/html.hpp"
#include "tools/report/json.hpp"
#include "tools/report/table.hpp"
#include "tools/report/timeline.hpp"

namespace ferry::app {

namespace {

constexpr const char* kRunFooter = R"(What is checked, in every step and on every rank:
  dispatch   with the oracle's places and bytes, to the bit
  combine    with experts that multiply by powers of two, against sums done again at home, to the bit
  SwiGLU     against a dense computation in fp32 without any exchange, relative error at most 2e-2
Then the same steps are timed without checks in between, and their results compared with the checked ones.

Examples:
  ferry run
  ferry run --processes --layout rank_major --format fp8
  ferry run --trace synth:prefill:experts=128,seed=7 --tokens 512 --hidden 2048
  ferry run --json - | python3 -m json.tool
  ferry run --html run.html --timeline run.trace.json
  ferry run --backend cuda --ranks 4 --hidden 7168
)";

struct Files {
  explicit Files(const RunOptions& options)
      : json(options.json), html(options.html), timeline(options.timeline) {}
  bool to_stdout() const { return json.to_stdout() || html.to_stdout() || timeline.to_stdout(); }
  Output json, html, timeline;
};

report::RunReport play(const Job& job) {
  Group group =
      job.options.processes ? Group::processes(job.options.ranks) : Group::threads(job.options.ranks);
  group.set_deadline(job.config.deadline);
  const Board board(job.options.ranks, job.options.steps, job.config.experts);
  const std::string started_at = utc_now();
  const Player::Clock::time_point start = Player::Clock::now();
  {
    const Stages stages(job.options);
    group.run([&](const Rank& rank) { Player(rank, job, start, board, stages).play(); });
  }

  report::RunReport run = make_report(job, board);
  run.started_at = started_at;
  if (job.config.backend == BackendKind::cuda) return run;  // the processor's memcpy says nothing about it
  run.machine.memcpy_threads = job.options.ranks;
  run.machine.memcpy_bytes_per_second = measure_memcpy(job.options.ranks);
  return run;
}

void write(const report::RunReport& run, const Job& job, const Files& files) {
  if (!files.to_stdout()) {
    fmt::print("{}", report::to_table(run));
    if (job.fell_back) fmt::print("\n{}\n", kWhereTracesAre);
  }
  if (files.json.wanted()) files.json.write(report::to_json(run).dump(2) + "\n");
  if (files.html.wanted()) files.html.write(report::to_html(run));
  if (files.timeline.wanted()) files.timeline.write(report::to_trace_events(run));
}

void throw_if_failed(const report::RunReport& run) {
  for (const report::Check& check : run.checks) {
    if (check.passed) continue;
    throw CheckFailed(fmt::format("check failed: {}: {} of {} wrong, {}", check.name, check.wrong,
                                  check.compared, check.detail));
  }
}

void run_steps(const RunOptions& options) {
  refuse_shared({{"--json", options.json}, {"--html", options.html}, {"--timeline", options.timeline}});
  const Files files(options);
  multiply_in_one_thread();
  const Job job = make_job(options);
  const report::RunReport report = play(job);
  write(report, job, files);
  throw_if_failed(report);
}

}  // namespace

void add_run(CLI::App& program) {
  CLI::App* command =
      program.add_subcommand("run", "Play a routing trace through dispatch, experts and combine");
  command->footer(kRunFooter);
  const auto options = std::make_shared<RunOptions>();
  add_run_options(*command, *options);
  command->callback([options] { run_steps(*options); });
}

}  // namespace ferry::app
