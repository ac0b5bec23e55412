// ferry bench: times dispatch and combine over a sweep, each point checked first.
#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "ferry/error.hpp"
#include "tools/ferry/bench/readme.hpp"
#include "tools/ferry/bench/report.hpp"
#include "tools/ferry/bench/runners.hpp"
#include "tools/ferry/bench/sweep.hpp"
#include "tools/ferry/commands/commands.hpp"
#include "tools/ferry/common/arguments.hpp"
#include "tools/ferry/common/config.hpp"
#include "tools/ferry/common/files.hpp"
#include "tools/ferry/common/machine.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

namespace {

constexpr const char* kBenchFooter = R"(
Every point is checked before it is timed: all counts, sources, weights and bytes that ranks receive are compared
with those sent, and all bytes that combine writes with the exact sum. Rows are printed as they are measured, and a
JSON file is rewritten after every point, so that an interrupted run keeps its measurements. `ferry bench
--help-columns` says what the columns mean.

Examples:
  ferry bench
  ferry bench --readme
  ferry bench --tokens 1:8192 --trace synth:uniform --trace synth:prefill
  ferry bench --tokens 128,2048 --ranks 2,4,8 --format bf16,fp8 --processes --json bench.json
  mpirun -n 4 ferry bench --backend collective --ranks 4 --tokens 2048
  mpirun -n 2 ferry bench --backend collective --engine nccl --ranks 2 --tokens 4096
  ferry bench --backend cuda --tokens 1:8192 --format bf16,fp8 --sms 0,32
  ferry bench --backend cuda --tokens 128 --format fp8 --work pair,plan,metadata,nccl --launch graph,eager)";

constexpr const char* kColumns = R"(Columns on the CPU (totals over all ranks):
E, K      experts and experts per token
routes    (token, expert) choices; pairs: distinct (token, rank); remote: pairs whose rank is not the token's own
busiest   the busiest rank's share of the routes
time      of a call from the first rank's start to the last rank's end, median (p99: 99th percentile, from
          100 on) of the repetitions; 20 short calls are timed together; four sets of inputs alternate
wire      bytes written to other ranks' memory per call
bandwidth bytes that count as moved, over the time. Dispatch: tokens read, wire bytes written and read, rows
          written; combine: rows read, wire bytes written and read, results written
memcpy    bytes read and written per second by as many threads as ranks, in buffers larger than the caches, mean
          of a measurement before and one after the point; both are shown where they differ by more than a
          quarter. Messages may fit in the caches, so a share can be above 100 %

Columns with --backend cuda (one line per call that is timed):
call      combine adds partial sums, calls have weights, are fused and in graphs unless the line says otherwise
time      of a call on the slowest rank, in graphs of 20 consecutive calls; eager: without graphs
wire      bytes that a rank writes to other ranks' memory per call; bandwidth: these bytes over the time
bound     lower bound of the time: the bytes that the busiest rank must send or receive, over the best push rate
          measured in this run with at most the line's SMs. Counts one row per (token, remote rank), and one per
          remote route for exact and unreduced sums. ratio: the time divided by it
host      time of the calling thread in an eager call with an idle stream, median of 1,000
nccl      baseline: sort rows by rank, exchange counts, all-to-all-v with one row per route; nccl_rows: the
          all-to-all-v alone

Columns with --backend collective on GPUs:
time      of a call that begins after a barrier, on the slowest rank, median of the repetitions; least and most
wire      bytes that a rank sends to others per call
all-to-all  an all-to-all-v of NCCL with the same messages; with two hops, with those between hosts
copy      of as many bytes as the busiest rank packs and unpacks, messages and rows, within its GPU
bound     all-to-all plus copy, measured in turn with the calls; ratio: the time divided by it

With --readme:
README    the figure of README.md, of the machine and date above it; measured: the same ratio on this machine.
          GPU figures need a GPU for each rank.
)";

void add_shape_options(CLI::App& command, BenchOptions& options) {
  command
      .add_option(
          "--trace", options.traces,
          "routing trace: a recorded one (folder/name or\npath.npy), or synth:decode, synth:prefill,\n"
          "synth:uniform; may be repeated; default: synth:uniform,\n"
          "synth:decode and the first recorded trace in FERRY_TRACES")
      ->type_name("NAME");
  add_text(command, "--tokens", options.tokens,
           "tokens per rank and call: 1:8192 doubles from 1 to 8192,\n1,5,64 is a list; default 1:2048",
           "LIST");
  add_list(command, "-n,--ranks", options.ranks, "numbers of ranks, all on this machine; default 4")
      ->check(in_range(1, 1024));
  add_choice(command, "--backend", options.backend,
             "cpu (default); collective: the ranks that mpirun has\nstarted on this machine; cuda: ranks are "
             "threads,\nassigned to the GPUs round robin",
             {"cpu", "collective", "cuda"});
  add_engine_options(command, options.choice);
  add_choice(command, "--hops", options.hops,
             "one, or two: between hosts by relays;\ndefault of collective: two where hosts have several "
             "ranks",
             {"automatic", "one", "two"});
  add_number(command, "--hosts", options.hosts,
             "divide the ranks into so many simulated hosts, which\nchanges how combine adds; cuda: with "
             "--hops two;\n"
             "default 1",
             1, 1024);
  command.add_flag("--processes", options.processes, "make each rank a process; default: a thread");
  add_list(command, "--format", options.formats,
           "any of bf16 (default), fp16, fp32,\nfp8[-columns][-pow2[-packed]],\nmxfp8 or "
           "mxfp4[-up|-ocp][-columns|-tiles],\nnvfp4[-token][-columns|-tiles]");
  add_global_scale(command, options.global_scale);
  add_names(command, "--layout", options.layouts, {"expert_major", "expert_padded", "rank_major"},
            "any of expert_major (default), expert_padded,\nrank_major");
  add_names(command, "--reduction", options.reductions, {"partial", "exact", "unreduced"},
            "any of partial (default), exact, unreduced");
}

void add_gpu_options(CLI::App& command, BenchOptions& options) {
  add_names(
      command, "--work", options.works, {"dispatch", "plan", "combine", "pair", "metadata", "nccl"},
      "cuda: calls to time, any of dispatch (default), plan\n(dispatch with an existing plan), combine "
      "(default),\n"
      "pair (dispatch and combine), metadata (token counts),\nnccl (baseline: all-to-all-v of sorted rows)");
  add_names(
      command, "--weights", options.weights, {"with", "without"},
      "cuda: any of with (default), without: whether dispatch\ncarries weights and combine applies them");
  add_names(command, "--launch", options.launches, {"graph", "eager"},
            "cuda: any of graph (default), eager (one by one; also\ntimes the calling thread)");
  add_names(command, "--form", options.forms, {"fused", "phases"},
            "cuda: any of fused (default), phases (send phase, then\nreceive phase)");
  add_list(command, "--sms", options.sms, "cuda: SMs of a call at most; default 0: no limit")
      ->check(in_range(0, 1024));
  add_text(command, "--nccl", options.nccl,
           "cuda: path of libnccl.so.2; default: searched by the\nloader, then in Python installations",
           "PATH");
}

// Prints each row once it is measured, and rewrites the JSON file.
class Sweep {
 public:
  template <class Points>
  Sweep(const Output& json, const Points& points)
      : json_(json),
        progress_("measuring, point", static_cast<std::int64_t>(points.size()), 1,
                  std::accumulate(points.begin(), points.end(), 0.0,
                                  [](double sum, const auto& point) { return sum + work_of(point); })) {
    progress_.show();
  }

  void print(const std::string& text) const {
    if (json_.to_stdout()) return;
    progress_.hide();
    fmt::print("{}", text);
    std::fflush(stdout);
  }
  void print(const BenchLines& row) {
    if (row.heading != heading_) print("\n" + row.heading);
    heading_ = row.heading;
    print(row.lines);
  }
  void end_point(double work, const nlohmann::ordered_json& report) const {
    if (!json_.to_stdout()) json_.write(report.dump(2) + "\n");
    progress_.advance(work);
    progress_.show();
  }
  // On the ranks of mpirun other than 0.
  void mute() const { progress_.mute(); }
  void end(const nlohmann::ordered_json& report, const std::string& remark = "") const {
    print(remark);
    json_.to_stdout() ? json_.write(report.dump(2) + "\n") : print(written_files({&json_}));
  }

 private:
  const Output& json_;
  Progress progress_;
  std::string heading_;
};

// A remark on machines that were busy.
std::string remark_on(const std::vector<HostBenchRow>& rows) {
  const auto unsteady = std::ranges::count_if(rows, &HostBenchRow::unsteady);
  if (unsteady == 0) return "";
  return fmt::format(
      "\n{} beside {} of {} memcpy changed by more than a quarter: other work shared the cores.\n"
      "Their figures are uncertain. Measure again on an idle machine.\n",
      report::toned("Warning:", report::Tone::doubtful, colours(stdout)), unsteady,
      report::counted(static_cast<std::int64_t>(rows.size()), "point"));
}
std::string remark_on(const std::vector<EngineBenchRow>&) {
  return "";
}

template <class Row>
void run_points(const std::vector<BenchPoint>& points, const Output& json, const char* figures,
                Row run(const BenchPoint&), nlohmann::ordered_json report(const std::vector<Row>&)) {
  std::vector<Row> rows;
  Sweep sweep(json, points);
  for (const BenchPoint& point : points) {
    rows.push_back(run(point));
    if (rows.back().rank != 0) {
      sweep.mute();
      continue;
    }
    if (rows.size() == 1) sweep.print(fmt::format("Machine: {}.{}", machine_line(), figures));
    sweep.print(lines_of(rows.back()));
    sweep.end_point(work_of(point), report(rows));
  }
  if (rows.front().rank == 0) sweep.end(report(rows), remark_on(rows));
}

void run_on_host(const BenchOptions& options, const Output& json) {
  const std::vector<Trace> traces = open_bench_traces(options);
  const std::vector<BenchPoint> points = bench_points(options, traces);
  if (on_device(points.front().config)) {
    return run_points(points, json, "\nTimes are of the slowest rank, wire bytes of a rank.\n",
                      run_engine_point, engine_bench_json);
  }
  const int most = std::ranges::max(options.ranks);
  const std::string waiting =
      options.backend == "cpu" && most > cores()
          ? fmt::format("With {} on {}, times include waiting for a core.\n", report::counted(most, "rank"),
                        report::counted(cores(), "core"))
          : "";
  run_points(points, json, (" Figures are totals over all ranks.\n" + waiting).c_str(), run_host_point,
             host_bench_json);
}

void run_on_gpus(const BenchOptions& options, const Output& json) {
  const std::vector<Trace> traces = open_bench_traces(options);
  const std::vector<GpuCase> cases = gpu_cases(options, traces);
  GpuBenchReport report;
  for (const int ranks : options.ranks) report.limits.push_back(measure_gpu_limits(ranks, options.sms));
  Sweep sweep(json, cases);
  int ranks = 0;
  for (const GpuCase& one : cases) {
    for (const GpuLimits& limits : report.limits) {
      if (ranks != one.point.ranks && limits.ranks == one.point.ranks) sweep.print(table_of(limits));
    }
    ranks = one.point.ranks;
    for (const GpuBenchRow& row : report.add(run_gpu_case(one, options.nccl))) sweep.print(lines_of(row));
    sweep.end_point(work_of(one), gpu_bench_json(report));
  }
  sweep.end(gpu_bench_json(report));
}

void run_readme(const BenchOptions& options, const Output& json) {
  const std::vector<ReadmeResult> results =
      measure_readme(readme_figures(), options.repetitions, options.nccl);
  write_report(json, readme_json(results), readme_table(results));
}

void run_bench(const BenchOptions& options, const CLI::App& command) {
  prepare_for_hops(options.hops);
  if (options.backend != "cuda" && !options.readme)
    refuse_given(command, {"--work", "--weights", "--launch", "--form", "--sms", "--nccl"},
                 "is only for --backend cuda");
  const Output json(options.json);
  if (options.readme) return run_readme(options, json);
  options.backend == "cuda" ? run_on_gpus(options, json) : run_on_host(options, json);
}

}  // namespace

void add_bench_options(CLI::App& command, BenchOptions& options) {
  add_shape_options(command, options);
  add_gpu_options(command, options);
  add_count(command, "--hidden", options.hidden, "columns of a token; default 7168");
  add_count(command, "--experts", options.experts,
            "experts of synthesised traces; default: as the first\nrecorded trace has, otherwise 256");
  add_number(
      command, "--top-k", options.top_k,
      "experts per token of synthesised traces; default: as\nthe first recorded trace has, otherwise 8", 1,
      kMaxTopK);
  add_count(command, "--repetitions", options.repetitions, "measurements of every point; default 50");
  add_seed(command, options.seed, "seed of synthesised traces; default 1");
  add_json(command, options.json);
  const std::vector<CLI::Option*> settings = command.get_options();
  CLI::Option* readme =
      command.add_flag("--readme", options.readme,
                       "measure the figures of README.md that this machine can\nrun, beside README's own; "
                       "goes only with --repetitions,\n--nccl and --json");
  for (CLI::Option* option : settings) {
    const std::string name = option->get_name();
    if (name != "--help" && name != "--repetitions" && name != "--nccl" && name != "--json")
      readme->excludes(option);
  }
}

void add_bench(CLI::App& program) {
  CLI::App* command =
      program.add_subcommand("bench", "Time dispatch and combine over a sweep, each point checked first");
  command->footer(kBenchFooter);
  command->add_flag_callback(
      "--help-columns",
      [] {
        fmt::print("{}", kColumns);
        throw CLI::Success();
      },
      "Print what the columns mean and exit");
  const auto options = std::make_shared<BenchOptions>();
  add_bench_options(*command, *options);
  command->callback([options, command] { run_bench(*options, *command); });
}

}  // namespace ferry::app
