// ferry run: runs a routing trace through dispatch, experts and combine, and checks every number.
#include <fmt/core.h>

#include <limits>
#include <memory>

#include "ferry/group.hpp"
#include "tools/ferry/commands/commands.hpp"
#include "tools/ferry/common/arguments.hpp"
#include "tools/ferry/common/machine.hpp"
#include "tools/ferry/common/output.hpp"
#include "tools/ferry/common/traces.hpp"
#include "tools/ferry/run/report.hpp"
#include "tools/ferry/run/run_spec.hpp"
#include "tools/ferry/run/runner.hpp"
#include "tools/ferry/run/shared_results.hpp"
#include "tools/ferry/run/swiglu.hpp"
#include "tools/report/html.hpp"
#include "tools/report/json.hpp"
#include "tools/report/table.hpp"
#include "tools/report/timeline.hpp"

namespace ferry::app {

namespace {

constexpr const char* kRunFooter = R"(Checks, in every step and on every rank:
  dispatch   row positions and bytes, bit for bit, against the oracle
  combine    with experts that multiply by powers of two, bit for bit, against sums computed on the source rank
  SwiGLU     against a dense computation in fp32 without an exchange, relative error at most 2e-2
The same steps are then timed without checks in between. The timed results must equal the checked ones.

Examples:
  ferry run
  ferry run --processes --layout rank_major --format fp8
  ferry run --trace synth:prefill:experts=128,seed=7 --tokens 512 --hidden 2048
  ferry run --json - | python3 -m json.tool
  ferry run --html run.html --timeline run.trace.json
  ferry run --backend cuda --ranks 4 --hidden 7168
)";

void add_group_options(CLI::App& command, RunOptions& options) {
  add_choice(command, "--backend", options.backend, "cpu (default), cuda, or reference (the oracle; slow)",
             {"cpu", "reference", "cuda"});
  add_number(command, "--ranks", options.ranks, "number of ranks, all on this machine; default 8", 1, 1024);
  command.add_flag("--processes", options.processes, "make each rank a process; default: a thread");
  add_count(command, "--deadline", options.deadline,
            "longest time, in seconds, that a rank waits for\nanother before the run fails; default 30");
}

void add_trace_options(CLI::App& command, RunOptions& options) {
  add_text(command, "--trace", options.trace,
           "routing trace: a recorded one (folder/name or\npath.npy), or synth:decode, synth:prefill,\n"
           "synth:uniform; default: the first recorded trace in\nFERRY_TRACES, otherwise synth:decode",
           "NAME");
  add_number(command, "--layer", options.layer, "use only this layer of the trace; default: all in turn", 0,
             std::numeric_limits<int>::max());
  add_count(command, "--steps", options.steps,
            "number of steps, each one dispatch, the experts and\none combine; default 16");
  add_count(command, "--tokens", options.tokens, "tokens per rank and step; default 128");
  add_count(command, "--experts", options.experts, "experts of a synthesised trace; default 256");
  add_number(command, "--top-k", options.top_k, "experts per token of a synthesised trace; default 8", 1,
             kMaxTopK);
  add_seed(command, options.seed,
           "seed of a synthesised trace, the tokens and the\nexperts' weights; default 1");
}

void add_exchange_options(CLI::App& command, RunOptions& options) {
  add_count(command, "--hidden", options.hidden, "columns of a token; default 1024");
  add_count(command, "--inner", options.inner, "inner columns of an expert; default 64");
  add_choice(command, "--layout", options.layout, "expert_major (default), expert_padded or rank_major",
             {"expert_major", "expert_padded", "rank_major"});
  command
      .add_option("--format", options.format,
                  "bf16 (default), fp16, fp32, or fp8 with any of the\nsuffixes -columns, -pow2, -packed")
      ->type_name("NAME");
  add_choice(command, "--reduction", options.reduction, "partial (default), exact or unreduced",
             {"partial", "exact", "unreduced"});
  add_count(command, "--alignment", options.alignment,
            "an expert's first row is a multiple of this; default 1");
}

void add_output_options(CLI::App& command, RunOptions& options) {
  add_output(command, "--json", options.json,
             "write the report as JSON; - is stdout and replaces\nthe table");
  add_output(command, "--html", options.html, "write the report as an HTML page; - is stdout");
  add_output(command, "--timeline", options.timeline,
             "write the timeline in Chrome trace format, for\nPerfetto; - is stdout");
}

struct OutputFiles {
  explicit OutputFiles(const RunOptions& options)
      : json(options.json), html(options.html), timeline(options.timeline) {}
  bool to_stdout() const { return json.to_stdout() || html.to_stdout() || timeline.to_stdout(); }
  Output json, html, timeline;
};

report::RunReport run_ranks(const RunSpec& spec) {
  const int ranks = spec.options.ranks;
  Group group = spec.options.processes ? Group::processes(ranks) : Group::threads(ranks);
  group.set_deadline(spec.config.deadline);
  const SharedResults results(ranks, spec.options.steps, spec.config.experts);
  const std::string started_at = utc_now();
  const RankRunner::Clock::time_point start = RankRunner::Clock::now();
  {
    const RunProgress progress(spec.options);
    group.run([&](const Rank& rank) {
      std::string stage = "while the ranks started";
      try {
        RankRunner(rank, spec, start, results, progress, stage).run();
      } catch (const TimeoutError& error) {
        throw TimeoutError(fmt::format("{}, {} (--deadline sets how long a rank waits)", error.what(), stage),
                           error.record);
      }
    });
  }

  report::RunReport run = make_report(spec, results);
  run.started_at = started_at;
  if (spec.config.backend == BackendKind::cuda) return run;  // the CPU's memcpy is no limit for GPUs
  run.machine.memcpy_threads = ranks;
  run.machine.memcpy_bytes_per_second = memcpy_bytes_per_second(ranks).median;
  return run;
}

void write_outputs(const report::RunReport& run, const RunSpec& spec, const OutputFiles& files) {
  if (!files.to_stdout()) {
    fmt::print("{}", report::to_table(run));
    if (spec.fell_back) fmt::print("\n{}\n", kHowToGetTraces);
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

void run_trace(const RunOptions& options) {
  refuse_shared({{"--json", options.json}, {"--html", options.html}, {"--timeline", options.timeline}});
  const OutputFiles files(options);
  limit_blas_to_one_thread();
  const RunSpec spec = make_run_spec(options);
  const report::RunReport report = run_ranks(spec);
  write_outputs(report, spec, files);
  throw_if_failed(report);
}

}  // namespace

void add_run(CLI::App& program) {
  CLI::App* command =
      program.add_subcommand("run", "Run a routing trace through dispatch, experts and combine, checked");
  command->footer(kRunFooter);
  const auto options = std::make_shared<RunOptions>();
  add_group_options(*command, *options);
  add_trace_options(*command, *options);
  add_exchange_options(*command, *options);
  add_output_options(*command, *options);
  command->callback([options] { run_trace(*options); });
}

}  // namespace ferry::app
