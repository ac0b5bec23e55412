// ferry run: runs a routing trace through dispatch, experts and combine, and checks every number.
#include <fmt/core.h>

#include <chrono>
#include <limits>
#include <memory>
#include <optional>
#include <string>

#include "base/enumerators.hpp"
#include "exchange/configuration.hpp"
#include "ferry/group.hpp"
#include "tools/ferry/commands/commands.hpp"
#include "tools/ferry/common/arguments.hpp"
#include "tools/ferry/common/config.hpp"
#include "tools/ferry/common/files.hpp"
#include "tools/ferry/common/machine.hpp"
#include "tools/ferry/run/program_run.hpp"
#include "tools/ferry/run/report.hpp"
#include "tools/ferry/run/run_spec.hpp"
#include "tools/ferry/run/runner.hpp"
#include "tools/ferry/run/shared_results.hpp"
#include "tools/ferry/run/swiglu.hpp"
#include "tools/report/forms.hpp"

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
  ferry run --compare earlier.json --html run.html
  ferry run --backend cuda --ranks 4 --hidden 7168
  ferry run --ranks 8 --hosts 2 --reduction-level rank
  mpirun -n 4 ferry run --backend collective --tokens 512
  mpirun -n 2 ferry run --backend collective --engine nccl
  mpirun -n 16 ferry run --backend nvshmem
  ferry run --overlap 2 --ranks 2 --timeline overlap.trace.json
  ferry run --program layer.txt
  ferry run --backend cuda --overlap 2 --tokens 4096 --timeline overlap.trace.json
)";

void add_group_options(CLI::App& command, RunOptions& options) {
  add_choice(
      command, "--backend", options.backend,
      "cpu, cuda, or collective and nvshmem: the ranks that\nmpirun has started; nvshmem with --hosts: "
      "processes of\nthis command; default: automatic, which is collective\nwith --engine, cuda with "
      "--memory "
      "device, else cpu",
      {"automatic", "cpu", "cuda", "collective", "nvshmem"});
  add_engine_options(command, options.choice);
  add_number(command, "-n,--ranks", options.ranks,
             "number of ranks, all on this machine; default 8;\ncollective: as many as mpirun has started", 1,
             1024);
  add_number(command, "--hosts", options.hosts,
             "divide the ranks into so many simulated hosts, which\nchanges how combine adds; default 1", 1,
             1024);
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
  add_number(command, "--shared-experts", options.shared_experts,
             "experts that every rank holds and every token goes\nto, besides those of the trace; default 0",
             0, kMaxSharedExperts);
  add_seed(command, options.seed,
           "seed of a synthesised trace, the tokens and the\nexperts' weights; default 1");
}

void add_exchange_options(CLI::App& command, RunOptions& options) {
  add_count(command, "--hidden", options.hidden, "columns of a token; default 1024");
  add_count(command, "--inner", options.inner, "inner columns of an expert; default 64");
  add_choice(command, "--layout", options.layout,
             "expert_major (default), expert_padded, rank_major or,\non host memory, expert_indexed",
             {"expert_major", "expert_padded", "rank_major", "expert_indexed"});
  command
      .add_option("--format", options.format,
                  "bf16 (default), fp16, fp32,\nfp8[-columns][-pow2[-packed]],\nmxfp8 or "
                  "mxfp4[-up|-ocp][-columns|-tiles],\nnvfp4[-token][-columns|-tiles]")
      ->type_name("NAME");
  add_global_scale(command, options.global_scale);
  add_choice(command, "--reduction", options.reduction, "partial (default), exact or unreduced",
             {"partial", "exact", "unreduced"});
  add_choice(command, "--reduction-level", options.reduction_level,
             "partial adds by rank, or first within each node, which\nis the default on several nodes",
             {"automatic", "rank", "node"});
  add_choice(
      command, "--input", options.input,
      "own (default): each rank has its own tokens;\nreplicated: all ranks have the same, and each gets its "
      "own\nexperts' part of the sums; gathered: tokens go to every\nrank, for few tokens with many experts",
      {"own", "replicated", "gathered"});
  add_choice(
      command, "--hops", options.hops,
      "one, or two: between hosts by relays;\ndefault: two with collective on host memory, where\nhosts "
      "have several ranks, and with nvshmem except for\nfew tokens",
      {"automatic", "one", "two"});
  add_count(command, "--alignment", options.alignment,
            "an expert's first row is a multiple of this; default 1");
}

void add_program_options(CLI::App& command, RunOptions& options) {
  add_text(command, "--program", options.program,
           "run this program (docs/programs.md) instead of one\ndispatch, experts and combine; its function "
           "is experts",
           "FILE");
  add_number(command, "--overlap", options.overlap,
             "run it also in so many micro-batches, compare the\nbytes, and time both", 1, 64);
}

void add_output_options(CLI::App& command, RunOptions& options) {
  add_json(command, options.json);
  add_output(command, "--html", options.html, "write the report as an HTML page; - is stdout");
  add_output(command, "--timeline", options.timeline,
             "write the timeline in Chrome trace format, for\nPerfetto; - is stdout");
  add_text(command, "--compare", options.compare,
           "an earlier run's --json FILE: its figures beside this\nrun's in the table, the JSON and the page",
           "FILE");
}

struct OutputFiles {
  explicit OutputFiles(const RunOptions& options)
      : json(options.json), html(options.html), timeline(options.timeline) {}
  bool to_stdout() const { return json.to_stdout() || html.to_stdout() || timeline.to_stdout(); }
  Output json, html, timeline;
};

// Replaces the backend `automatic` by the one that an exchange of ranks on this host takes.
void resolve_backend(RunOptions& options) {
  if (options.backend != to_string(BackendKind::automatic)) return;
  Config config;
  config.engine = enumerator_named<EngineKind>("--engine", options.choice.engine);
  config.memory = enumerator_named<MemoryKind>("--memory", options.choice.memory);
  resolve_by_hosts(config, Topology({0}), true);
  options.backend = to_string(config.backend);
  if (config.backend != BackendKind::collective) options.choice.memory = to_string(MemoryKind::automatic);
}

Group make_group(const RunOptions& options) {
  // NVSHMEM takes one rank of a process.
  const LocalGroup local{.ranks = options.ranks > 0 ? options.ranks : 8,
                         .hosts = options.hosts,
                         .processes = options.processes || options.backend == "nvshmem"};
  if (!options.on_mpi()) return local_group(local);
  if (options.backend == "collective") refuse_local_options(local);
  return mpi_group(options.ranks, options.backend);
}

// The nodes of the ranks that run in this process or in its children.
Topology simulated_nodes(const RunOptions& options) {
  return Topology::blocks(options.ranks, options.hosts, options.hosts > 1);
}

// Which rank of mpirun this process is, once the ranks have met. Otherwise it starts all ranks, and reports
// as rank 0 does.
struct Membership {
  int rank = 0;
  Topology topology;
};

// The report of all ranks; empty on the ranks of mpirun other than 0.
std::optional<report::RunReport> run_ranks(const RunSpec& spec, Group& group) {
  const int ranks = group.size();
  const bool on_mpi = spec.options.on_mpi();
  group.set_deadline(spec.config.deadline);
  const SharedResults results(ranks, spec.options.steps, spec.config.experts);
  Membership me{.topology = simulated_nodes(spec.options)};
  const std::string started_at = utc_now();
  auto start = std::chrono::steady_clock::now();
  {
    const RunProgress progress(on_mpi ? 1 : ranks, spec.options.steps);
    group.run([&](const Rank& rank) {
      if (!on_mpi) return run_rank(rank, spec, start, results, progress);
      me = {.rank = rank.index(), .topology = rank.topology()};
      if (me.rank != 0) progress.mute();
      rank.barrier();  // the clocks of hosts differ: times count from here
      start = std::chrono::steady_clock::now();
      run_rank(rank, spec, start, results, progress);
      results.gather(rank);
    });
  }
  if (me.rank != 0) return std::nullopt;

  report::RunReport run = make_report(spec, me.topology, results);
  run.started_at = started_at;
  // The memcpy of this host's CPU is no limit for GPUs and for ranks of other hosts.
  const bool one_host = me.topology.nodes() == 1 || me.topology.simulated();
  if (on_device(spec.config) || !one_host) return run;
  run.machine.memcpy_threads = ranks;
  run.machine.memcpy_bytes_per_second = memcpy_bytes_per_second(ranks).median;
  return run;
}

// `table`: for standard output, unless another form goes there. `Report`: of a run or of programs.
template <class Report>
void write_outputs(const Report& run, const std::string& table, const OutputFiles& files) {
  if (!files.to_stdout()) fmt::print("{}", table);
  if (files.json.wanted()) files.json.write(report::to_json(run).dump(2) + "\n");
  if (files.html.wanted()) files.html.write(report::to_html(run));
  if (files.timeline.wanted()) files.timeline.write(report::to_trace_events(run));
  if (!files.to_stdout()) fmt::print("{}", written_files({&files.json, &files.html, &files.timeline}));
}

void throw_if_failed(const report::RunReport& run) {
  for (const report::Check& check : run.checks) {
    if (check.passed) continue;
    throw CheckFailed(fmt::format("check failed: {}: {} of {} wrong, {}", check.name, check.wrong,
                                  check.compared, check.detail));
  }
}

void check_program_options(const RunOptions& options) {
  const char* const option = options.program.empty() ? "--overlap" : "--program";
  if (options.shared_experts > 0)
    throw UsageError(
        fmt::format("{} with --shared-experts: a program's experts are those of the trace", option));
  if (options.layout == "expert_indexed") {
    throw UsageError(
        fmt::format("{} with --layout expert_indexed: programs pass the rows of a dispatch on, and here "
                    "those of combine are others; use expert_major",
                    option));
  }
  if (const std::string gpu = options.gpu_option(); !gpu.empty() && options.layout == "rank_major") {
    throw UsageError(fmt::format(
        "{} with {} and --layout rank_major: the experts of programs on GPUs take rows by expert; use "
        "expert_major or expert_padded",
        option, gpu));
  }
  if (!options.compare.empty())
    throw UsageError(
        fmt::format("--compare with {}: only reports of runs without a program are compared", option));
}

void run_program_trace(const RunSpec& spec, Group& group, const OutputFiles& files) {
  const Program plain = program_of(spec);
  const Program batched = spec.options.overlap > 1 ? overlap(plain, spec.options.overlap) : plain;
  const ProgramResults results(spec.options.ranks, spec.options.steps, plain.steps.size(),
                               batched.steps.size());
  group.set_deadline(spec.config.deadline);
  Membership me{.topology = simulated_nodes(spec.options)};
  const std::string started_at = utc_now();
  group.run([&](const Rank& rank) {
    if (spec.options.on_mpi()) me = {.rank = rank.index(), .topology = rank.topology()};
    run_programs(rank, spec, plain, batched, results);
  });
  if (me.rank != 0) return;
  report::ProgramReport run = make_program_report(spec, me.topology, plain, batched, results);
  run.started_at = started_at;
  write_outputs(run, program_table(run, colours(stdout)), files);
  if (results.summary().sums.wrong + results.summary().batches.wrong > 0)
    throw CheckFailed("check failed: results of the program differ");
}

void run_trace(RunOptions options) {
  resolve_backend(options);
  prepare_for_hops(options.hops);
  if (options.runs_program()) check_program_options(options);
  refuse_shared({{"--compare", options.compare},
                 {"--json", options.json},
                 {"--html", options.html},
                 {"--timeline", options.timeline}});
  const std::shared_ptr<const report::RunReport> earlier = read_earlier_run(options.compare);
  const OutputFiles files(options);
  limit_blas_to_one_thread();
  Group group = make_group(options);
  options.ranks = group.size();
  const RunSpec spec = make_run_spec(options);
  if (options.runs_program()) return run_program_trace(spec, group, files);
  std::optional<report::RunReport> report = run_ranks(spec, group);
  if (!report) return;
  report->compared_with = earlier;
  write_outputs(*report, report::to_table(*report, colours(stdout)), files);
  throw_if_failed(*report);
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
  add_program_options(*command, *options);
  add_output_options(*command, *options);
  command->callback([options] { run_trace(*options); });
}

}  // namespace ferry::app
