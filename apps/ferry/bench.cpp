// ferry bench: how long dispatch and combine take, against what memory allows.
#include <fmt/core.h>

#include <memory>

#include "apps/ferry/bench_device.hpp"
#include "apps/ferry/bench_device_report.hpp"
#include "apps/ferry/bench_options.hpp"
#include "apps/ferry/bench_player.hpp"
#include "apps/ferry/bench_report.hpp"
#include "apps/ferry/commands.hpp"
#include "apps/ferry/output.hpp"
#include "apps/ferry/progress.hpp"

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

--backend cuda: times are of graphs of twenty calls that follow each other on the ranks' streams, on the slowest
rank; floor is what the busiest rank must send or receive, as fast as ranks can push with the SMs of the row
(push: measured in the same run); host is the calling thread's time for a call outside of graphs.

Before a point is timed, every count, source, weight and byte that arrives is compared with what was sent, and
every byte that combine brings home with the exact sum.

Examples:
  ferry bench
  ferry bench --tokens 1:8192 --trace synth:uniform --trace synth:prefill
  ferry bench --tokens 128,2048 --ranks 2,4,8 --format bf16,fp8 --processes --json bench.json
  ferry bench --backend cuda --tokens 1:8192 --sms 0,8,24)";

void run(const BenchOptions& options) {
  const Output json(options.json);
  const std::vector<Trace> traces = open_bench_traces(options);
  const std::vector<BenchPoint> points = bench_points(options, traces);
  const bool on_gpus = options.backend == "cuda";
  std::vector<BenchRow> rows;
  {
    Progress progress("measuring, point", static_cast<std::int64_t>(points.size()));
    progress.show();
    for (const BenchPoint& point : points) {
      rows.push_back({point, on_gpus ? play_device_bench(point) : play_bench(point)});
      progress.advance();
    }
  }
  if (!json.to_stdout()) fmt::print("{}", on_gpus ? device_bench_table(rows) : bench_table(rows));
  if (json.wanted()) json.write((on_gpus ? device_bench_json(rows) : bench_json(rows)).dump(2) + "\n");
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
