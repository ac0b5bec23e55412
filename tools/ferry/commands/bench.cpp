// ferry bench: how long dispatch and combine take, against what memory allows.
#include <fmt/core.h>

#include <memory>

#include "tools/ferry/bench/device_bench.hpp"
#include "tools/ferry/bench/device_cases.hpp"
#include "tools/ferry/bench/device_report.hpp"
#include "tools/ferry/bench/host_runner.hpp"
#include "tools/ferry/bench/options.hpp"
#include "tools/ferry/bench/report.hpp"
#include "tools/ferry/bench/sweep.hpp"
#include "tools/ferry/commands/commands.hpp"
#include "tools/ferry/common/output.hpp"
#include "tools/ferry/common/progress.hpp"

namespace ferry::app {

namespace {

constexpr const char* kFooter = R"(
N*K all   routes; pairs: distinct (token, rank); remote: of those, with another rank than the token's own
busiest   share of the routes that goes to the busiest rank
times     from the first rank's start to the last one's end: median and 99th percentile of the repetitions;
          short calls are timed twenty at a time; four sets of tokens, ids and weights take turns
wire      bytes written to other ranks' memory
GB/s      dispatch: tokens read, wire bytes written and read, rows written; combine: rows read, wire bytes
          written and read, results written
memcpy    bytes read and written by as many threads or processes, in turn with the calls of the same point

--backend cuda: a line for each call that is timed
time      of a call on the slowest rank, of graphs of twenty calls that follow each other; eager: without graphs
wire      bytes a rank writes to others' memory in a call, and that over the time
floor     what the busiest rank must send or receive, as fast as all ranks can push at once with at most the SMs
          of the line: a row for each (token, remote rank), of exact and unreduced sums for each remote route;
          pushing is measured in the same run
host      time of the calling thread in an eager call, the stream idle: median of 1,000
nccl      rows sorted by rank, counts exchanged, all-to-all-v with a row for each route; nccl_rows: the last alone
A JSON file is written anew after every configuration, so that what was measured is there whatever comes later.

Before a point is timed, every count, source, weight and byte that arrives is compared with what was sent, and
every byte that combine brings home with the exact sum.

Examples:
  ferry bench
  ferry bench --tokens 1:8192 --trace synth:uniform --trace synth:prefill
  ferry bench --tokens 128,2048 --ranks 2,4,8 --format bf16,fp8 --processes --json bench.json
  ferry bench --backend cuda --tokens 1:8192 --format bf16,fp8 --sms 0,32
  ferry bench --backend cuda --tokens 128 --format fp8 --work pair,plan,metadata,nccl --launch graph,eager)";

void run_on_host(const BenchOptions& options, const Output& json) {
  const std::vector<Trace> traces = open_bench_traces(options);
  const std::vector<BenchPoint> points = bench_points(options, traces);
  std::vector<BenchRow> rows;
  {
    Progress progress("measuring, point", static_cast<std::int64_t>(points.size()));
    progress.show();
    for (const BenchPoint& point : points) {
      rows.push_back({point, run_host_bench(point)});
      progress.advance();
    }
  }
  if (!json.to_stdout()) fmt::print("{}", bench_table(rows));
  if (json.wanted()) json.write(bench_json(rows).dump(2) + "\n");
}

void run_on_gpus(const BenchOptions& options, const Output& json) {
  const std::vector<Trace> traces = open_bench_traces(options);
  const std::vector<GpuCase> cases = gpu_cases(options, traces);
  GpuBenchReport report;
  for (const int ranks : options.ranks) report.limits.push_back(measure_gpu_limits(ranks, options.sms));
  {
    Progress progress("measuring, configuration", static_cast<std::int64_t>(cases.size()));
    progress.show();
    for (const GpuCase& one : cases) {
      report.add(run_gpu_case(one, options.nccl));
      if (json.wanted() && !json.to_stdout()) json.write(gpu_bench_json(report).dump(2) + "\n");
      progress.advance();
    }
  }
  if (!json.to_stdout()) fmt::print("{}", gpu_bench_table(report));
  if (json.to_stdout()) json.write(gpu_bench_json(report).dump(2) + "\n");
}

void run(const BenchOptions& options) {
  const Output json(options.json);
  options.backend == "cuda" ? run_on_gpus(options, json) : run_on_host(options, json);
}

}  // namespace

void add_bench(CLI::App& program) {
  CLI::App* command = program.add_subcommand("bench", "Time dispatch and combine, checked, over a sweep");
  command->footer(kFooter);
  const auto options = std::make_shared<BenchOptions>();
  add_bench_options(*command, *options);
  command->callback([options] { run(*options); });
}

}  // namespace ferry::app
