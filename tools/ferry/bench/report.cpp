#include "tools/ferry/bench/report.hpp"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/ferry/bench/engine_bench.hpp"
#include "tools/ferry/bench/inputs.hpp"
#include "tools/ferry/bench/point.hpp"
#include "tools/ferry/common/files.hpp"
#include "tools/ferry/common/machine.hpp"
#include "tools/ferry/common/traces.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

namespace {

// The fields of a point.
nlohmann::ordered_json point_json(const BenchPoint& point, const BenchRouting& routing) {
  return {{"ranks", point.ranks},
          {"tokens", point.tokens},
          {"hidden", point.config.hidden},
          {"experts", point.config.experts},
          {"top_k", point.config.top_k},
          {"format", to_string(point.config.format)},
          {"layout", to_string(point.config.layout)},
          {"router", point.trace->name},
          {"router_source", point.trace->source},
          {"routes", routing.routes},
          {"pairs", routing.pairs},
          {"remote_pairs", routing.remote_pairs},
          {"busiest_share", routing.busiest_share},
          {"sets", BenchInputs::kSets},
          {"launches", point.launches}};
}

// ---- CPU

std::string kind_of(const BenchPoint& point) {
  if (point.config.backend == BackendKind::collective) return "collective, processes of mpirun";
  const std::string ranks = point.processes ? "processes" : "threads";
  return point.hosts > 1 ? fmt::format("{} on {} simulated hosts", ranks, point.hosts) : ranks;
}

nlohmann::ordered_json microseconds_or_null(const std::optional<double>& seconds) {
  if (!seconds) return nullptr;
  return *seconds * 1e6;
}

std::string in_time_or_dash(double seconds) {
  return seconds > 0 ? report::in_time(seconds * 1e6) : "-";
}

// Median and, where the point has repetitions enough for it, the 99th percentile.
std::string times_text(const BenchTimes& times) {
  return fmt::format("{:>8}{}", report::in_time(times.p50 * 1e6),
                     times.p99 ? fmt::format(" {:>8}", report::in_time(*times.p99 * 1e6)) : "");
}
const char* p99_column(const BenchTimes& times) {
  return times.p99 ? "      p99" : "";
}

std::string call_line(const char* name, const HostCall& call, double memcpy) {
  return fmt::format("  {:<8} {} {:>8} {:>10} {:>9}\n", name, times_text(call.seconds),
                     report::in_bytes(call.wire_bytes), report::in_bytes_per_second(call.bytes_per_second()),
                     report::in_percent(call.bytes_per_second() / memcpy));
}

std::string memcpy_text(const HostBenchRow& row) {
  if (!row.unsteady())
    return fmt::format("       memcpy {}", report::in_bytes_per_second(row.memcpy_bytes_per_second()));
  return fmt::format(" memcpy {} before, {} after", report::in_bytes_per_second(row.memcpy_before),
                     report::in_bytes_per_second(row.memcpy_after));
}

nlohmann::ordered_json call_json(const HostCall& call, double memcpy) {
  return {{"p50_us", call.seconds.p50 * 1e6},
          {"p99_us", microseconds_or_null(call.seconds.p99)},
          {"wire_bytes", call.wire_bytes},
          {"moved_bytes", call.moved_bytes},
          {"bytes_per_second", call.bytes_per_second()},
          {"share_of_memcpy", call.bytes_per_second() / memcpy}};
}

nlohmann::ordered_json host_row_json(const HostBenchRow& row) {
  const BenchPoint& point = row.point;
  nlohmann::ordered_json json = point_json(point, row.routing);
  json["group"] = kind_of(point);
  json["reduction"] = to_string(point.config.reduction);
  if (point.config.backend == BackendKind::collective) {
    json["hops"] = to_string(point.config.hops);
  } else {
    json["hosts"] = point.hosts;
  }
  json["rows"] = row.rows;
  json["rows_checked"] = row.rows_checked;
  json["repetitions"] = point.repetitions;
  json["memcpy_bytes_per_second"] = row.memcpy_bytes_per_second();
  json["memcpy_bytes_per_second_before"] = row.memcpy_before;
  json["memcpy_bytes_per_second_after"] = row.memcpy_after;
  json["dispatch"] = call_json(row.dispatch, row.memcpy_bytes_per_second());
  json["combine"] = call_json(row.combine, row.memcpy_bytes_per_second());
  return json;
}

// ---- GPUs

std::string gpu_figures(const GpuTimes& times) {
  if (!times.skipped.empty()) return "skipped: " + times.skipped;
  const double bound = times.lower_bound_seconds();
  return fmt::format("{} {:>7} {:>9} {:>8} {:>6} {:>8}", times_text(times.seconds),
                     report::in_bytes(times.wire_bytes),
                     report::in_bytes_per_second(times.wire_bytes_per_second()), in_time_or_dash(bound),
                     bound > 0 ? fmt::format("{:.2f}", times.seconds.p50 / bound) : "-",
                     in_time_or_dash(times.host_seconds));
}

// The call, and what is not the default of it.
std::string name_of(const TimedCall& call) {
  std::string name = to_string(call.work);
  if (call.combines() && call.reduction != Reduction::partial)
    name += std::string(" ") + to_string(call.reduction);
  if (call.in_phases) name += ", phases";
  if ((call.dispatches() || call.combines()) && !call.weighted) name += ", no weights";
  return call.eager ? name + ", eager" : name;
}

nlohmann::ordered_json gpu_row_json(const GpuBenchRow& row) {
  const GpuTimes& times = row.times;
  nlohmann::ordered_json json{{"work", to_string(row.call.work)}};
  json.update(point_json(row.point, row.routing));
  json["reduction"] = row.call.combines() ? nlohmann::ordered_json(to_string(row.call.reduction)) : nullptr;
  json["weights"] = row.call.weighted;
  if (row.point.hosts > 1) {
    json["hops"] = to_string(row.point.config.hops);
    json["hosts"] = row.point.hosts;
  }
  json["sm_limit"] = row.call.sm_limit;
  json["form"] = row.call.in_phases ? "phases" : "fused";
  json["launch"] = row.call.eager ? "eager" : "graph";
  if (!times.skipped.empty()) {
    json["skipped"] = times.skipped;
    return json;
  }
  const double bound = times.lower_bound_seconds();
  json["replays"] = row.point.repetitions;
  json["rows_checked"] = times.rows_checked;
  json["p50_us"] = times.seconds.p50 * 1e6;
  json["p99_us"] = microseconds_or_null(times.seconds.p99);
  json["wire_bytes"] = times.wire_bytes;
  json["wire_bytes_per_second"] = times.wire_bytes_per_second();
  json["lower_bound_bytes"] = times.lower_bound_bytes;
  json["push_bytes_per_second"] = times.push_bytes_per_second;
  json["lower_bound_us"] = bound * 1e6;
  json["ratio_to_lower_bound"] = bound > 0 ? nlohmann::ordered_json(times.seconds.p50 / bound) : nullptr;
  json["host_us"] =
      row.call.eager && !row.call.uses_nccl() ? nlohmann::ordered_json(times.host_seconds * 1e6) : nullptr;
  return json;
}

}  // namespace

nlohmann::ordered_json bench_json(const char* schema, int schema_version) {
  nlohmann::ordered_json json = report_json(schema, schema_version);
  json.update({{"command", command_line()}, {"started_at", utc_now()}, {"machine", machine_json()}});
  return json;
}

BenchLines lines_of(const HostBenchRow& row) {
  const Config& config = row.point.config;
  const BenchRouting& routing = row.routing;
  const double memcpy = row.memcpy_bytes_per_second();
  return {
      fmt::format("{} ({}), {}, {}, {}\n{}, E {}, K {}, hidden {}\n"
                  "tokens    routes    pairs   remote busiest  call         time{}     wire  bandwidth of "
                  "memcpy\n",
                  report::counted(row.point.ranks, "rank"), kind_of(row.point), to_string(config.format),
                  to_string(config.layout), to_string(config.reduction), short_name(row.point.trace->name),
                  config.experts, config.top_k, config.hidden, p99_column(row.dispatch.seconds)),
      fmt::format("{:>6} {:>9} {:>8} {:>8} {:>7}{}{:<42}{}", report::with_thousands(row.point.tokens),
                  report::with_thousands(routing.routes), report::with_thousands(routing.pairs),
                  report::with_thousands(routing.remote_pairs), report::in_percent(routing.busiest_share),
                  call_line("dispatch", row.dispatch, memcpy), memcpy_text(row),
                  call_line("combine", row.combine, memcpy))};
}

BenchLines lines_of(const GpuBenchRow& row) {
  const Config& config = row.point.config;
  const std::string hosts =
      row.point.hosts > 1 ? fmt::format(", two hops between {} simulated hosts", row.point.hosts) : "";
  return {
      fmt::format("{}, {}, E {}, K {}; {}, {}{}\n"
                  "call                         tokens SMs     time{}    wire bandwidth    bound  ratio"
                  "     host\n",
                  report::counted(row.point.ranks, "rank"), short_name(row.point.trace->name), config.experts,
                  config.top_k, to_string(config.format), to_string(config.layout), hosts,
                  p99_column(row.times.seconds)),
      fmt::format("{:<27} {:>7} {:>3} {}\n", name_of(row.call), report::with_thousands(row.point.tokens),
                  row.call.sm_limit > 0 ? std::to_string(row.call.sm_limit) : "all", gpu_figures(row.times))};
}

nlohmann::ordered_json host_bench_json(const std::vector<HostBenchRow>& rows) {
  nlohmann::ordered_json json = bench_json("ferry.bench", 2);
  json["points"] = nlohmann::ordered_json::array();
  for (const HostBenchRow& row : rows) json["points"].push_back(host_row_json(row));
  return json;
}

std::span<const GpuBenchRow> GpuBenchReport::add(std::vector<GpuBenchRow> more) {
  const std::size_t before = rows.size();
  for (GpuBenchRow& row : more) {
    for (const GpuLimits& one : limits) {
      if (one.ranks == row.point.ranks) row.times.push_bytes_per_second = best_push(one, row.call.sm_limit);
    }
    rows.push_back(std::move(row));
  }
  return std::span(rows).subspan(before);
}

nlohmann::ordered_json gpu_bench_json(const GpuBenchReport& report) {
  nlohmann::ordered_json json = bench_json("ferry.bench.cuda", 3);
  json["limits"] = nlohmann::ordered_json::array();
  for (const GpuLimits& limits : report.limits) json["limits"].push_back(json_of(limits));
  json["rows"] = nlohmann::ordered_json::array();
  for (const GpuBenchRow& row : report.rows) json["rows"].push_back(gpu_row_json(row));
  return json;
}

namespace {

std::string engine_line(const EngineBenchRow& row, const char* name, const EngineCall& call) {
  return fmt::format("{:>7}  {:<8} {:>8} {:>9} {:>9} {:>8} {:>10} {:>8} {:>8} {:>5}\n",
                     report::with_thousands(row.point.tokens), name, in_time_or_dash(call.call.p50),
                     in_time_or_dash(call.call.least), in_time_or_dash(call.call.most),
                     report::in_bytes(call.wire_bytes), in_time_or_dash(call.all_to_all.p50),
                     in_time_or_dash(call.copy.p50), in_time_or_dash(call.bound_seconds()),
                     call.ratio() > 0 ? fmt::format("{:.2f}", call.ratio()) : "-");
}

nlohmann::ordered_json engine_json(const RoundTimes& times) {
  return {{"p50_us", times.p50 * 1e6}, {"least_us", times.least * 1e6}, {"most_us", times.most * 1e6}};
}

nlohmann::ordered_json engine_json(const EngineCall& call) {
  const bool bound = call.bound_seconds() > 0;
  nlohmann::ordered_json json = engine_json(call.call);
  json["wire_bytes"] = call.wire_bytes;
  json["wire_bytes_between_nodes"] = call.between_nodes;
  json["all_to_all"] = bound ? engine_json(call.all_to_all) : nlohmann::ordered_json(nullptr);
  json["all_to_all_bytes"] = call.all_to_all_bytes;
  json["copy"] = engine_json(call.copy);
  json["copied_bytes"] = call.copied_bytes;
  json["bound_us"] = bound ? nlohmann::ordered_json(call.bound_seconds() * 1e6) : nullptr;
  json["ratio"] = bound ? nlohmann::ordered_json(call.ratio()) : nullptr;
  return json;
}

}  // namespace

RoundTimes round_times(const std::vector<double>& seconds) {
  const auto [least, most] = std::minmax_element(seconds.begin(), seconds.end());
  return {.p50 = times_of(seconds).p50, .least = *least, .most = *most};
}

BenchLines lines_of(const EngineBenchRow& row) {
  const Config& config = row.point.config;
  return {fmt::format("{} on {} ({}{}), {}, {}, {}, {}, {}\n{}, E {}, K {}, hidden {}\n"
                      " tokens  call         time     least      most     wire all-to-all     copy    bound "
                      "ratio\n",
                      report::counted(row.point.ranks, "rank"), report::counted(row.nodes, "host"),
                      row.engine, row.registers ? ", registered" : "", row.gpu,
                      config.hops == Hops::two ? "two hops" : "one hop", to_string(config.format),
                      to_string(config.layout), to_string(config.reduction),
                      short_name(row.point.trace->name), config.experts, config.top_k, config.hidden),
          engine_line(row, "dispatch", row.dispatch) + engine_line(row, "combine", row.combine)};
}

nlohmann::ordered_json engine_bench_json(const std::vector<EngineBenchRow>& rows) {
  nlohmann::ordered_json json = bench_json("ferry.bench.engine", 1);
  json["points"] = nlohmann::ordered_json::array();
  for (const EngineBenchRow& row : rows) {
    nlohmann::ordered_json point = point_json(row.point, row.routing);
    point["hosts"] = row.nodes;
    point["engine"] = row.engine;
    point["registers"] = row.registers;
    point["gpu"] = row.gpu;
    point["hops"] = to_string(row.point.config.hops);
    point["reduction"] = to_string(row.point.config.reduction);
    point["rows_checked"] = row.rows_checked;
    point["rounds"] = row.point.repetitions;
    point["dispatch"] = engine_json(row.dispatch);
    point["combine"] = engine_json(row.combine);
    json["points"].push_back(point);
  }
  return json;
}

}  // namespace ferry::app
