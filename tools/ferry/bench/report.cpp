#include "tools/ferry/bench/report.hpp"

#include <fmt/core.h>

#include <utility>

#include "ferry/version.hpp"
#include "tools/ferry/bench/inputs.hpp"
#include "tools/ferry/common/machine.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

namespace {

// ---- both

// The trace's name. A synthesised trace's parameters are left out, because the line shows them.
std::string router_of(const BenchPoint& point) {
  const std::string& name = point.trace->name;
  return name.starts_with("synth:") ? name.substr(0, name.find(':', 6)) : name;
}

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

// The fields with which every report begins.
nlohmann::ordered_json report_json(const char* schema, int version_number) {
  return {{"schema", schema},
          {"schema_version", version_number},
          {"ferry_version", std::string(version())},
          {"command", command_line()},
          {"started_at", utc_now()},
          {"machine", {{"cpu", cpu_name()}, {"cores", cores()}, {"memory_bytes", memory_bytes()}}}};
}

// ---- CPU

std::string kind_of(const BenchPoint& point) {
  if (point.config.backend == BackendKind::collective) return "collective, processes of mpirun";
  const std::string ranks = point.processes ? "processes" : "threads";
  return point.hosts > 1 ? fmt::format("{} on {} simulated hosts", ranks, point.hosts) : ranks;
}

// What a group of lines has in common.
std::string heading(const BenchPoint& point) {
  return fmt::format("{} ({}), {}, {}, {}, hidden {}", report::counted(point.ranks, "rank"), kind_of(point),
                     to_string(point.config.format), to_string(point.config.layout),
                     to_string(point.config.reduction), point.config.hidden);
}

constexpr const char* kHostColumns =
    "tokens router                          E/K    routes   pairs  remote busiest |"
    "  dispatch      p99     wire       GB/s of memcpy |   combine      p99     wire       GB/s of memcpy |"
    "    memcpy\n";

std::string call_figures(const HostCall& call, double memcpy) {
  return fmt::format("{:>9} {:>8} {:>8} {:>5.1f} GB/s {:>9}", report::in_time(call.seconds.p50 * 1e6),
                     report::in_time(call.seconds.p99 * 1e6), report::in_bytes(call.wire_bytes),
                     call.bytes_per_second() * 1e-9, report::in_percent(call.bytes_per_second() / memcpy));
}

std::string host_line(const HostBenchRow& row) {
  const BenchPoint& point = row.point;
  const BenchRouting& routing = row.routing;
  return fmt::format("{:>6} {:<28} {:>4}/{:<2} {:>9} {:>7} {:>7} {:>7} | {} | {} | {:>5.1f} GB/s\n",
                     point.tokens, router_of(point), point.config.experts, point.config.top_k, routing.routes,
                     routing.pairs, routing.remote_pairs, report::in_percent(routing.busiest_share),
                     call_figures(row.dispatch, row.memcpy_bytes_per_second),
                     call_figures(row.combine, row.memcpy_bytes_per_second),
                     row.memcpy_bytes_per_second * 1e-9);
}

nlohmann::ordered_json call_json(const HostCall& call, double memcpy) {
  return {{"p50_us", call.seconds.p50 * 1e6},
          {"p99_us", call.seconds.p99 * 1e6},
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
  json["memcpy_bytes_per_second"] = row.memcpy_bytes_per_second;
  json["dispatch"] = call_json(row.dispatch, row.memcpy_bytes_per_second);
  json["combine"] = call_json(row.combine, row.memcpy_bytes_per_second);
  return json;
}

// ---- GPUs

constexpr const char* kGpuColumns =
    "work                  tokens router                  E/K    format layout        reduction weights SMs "
    "launch |"
    "      time       p99 |     wire        GB/s |     bound  x bound |     host\n";

std::string gpu_figures(const GpuTimes& times) {
  if (!times.skipped.empty()) return "skipped: " + times.skipped;
  const double bound = times.lower_bound_seconds();
  return fmt::format("{:>9} {:>9} | {:>8} {:>6.1f} GB/s | {:>9} {:>8} | {:>8}",
                     report::in_time(times.seconds.p50 * 1e6), report::in_time(times.seconds.p99 * 1e6),
                     report::in_bytes(times.wire_bytes), times.wire_bytes_per_second() * 1e-9,
                     bound > 0 ? report::in_time(bound * 1e6) : "-",
                     bound > 0 ? fmt::format("{:.2f}", times.seconds.p50 / bound) : "-",
                     times.host_seconds > 0 ? report::in_time(times.host_seconds * 1e6) : "-");
}

std::string gpu_line(const GpuBenchRow& row) {
  const TimedCall& call = row.call;
  const Config& config = row.point.config;
  const bool moves_rows = call.work != Work::metadata;
  const std::string experts = fmt::format("{}/{}", config.experts, config.top_k);
  return fmt::format("{:<21} {:>6} {:<23} {:<6} {:<6} {:<13} {:<9} {:<7} {:>3} {:<6} | {}\n",
                     fmt::format("{}{}", to_string(call.work), call.in_phases ? ", phases" : ""),
                     row.point.tokens, router_of(row.point), experts,
                     moves_rows ? to_string(config.format) : "-", moves_rows ? to_string(config.layout) : "-",
                     call.combines() ? to_string(call.reduction) : "-", call.weighted ? "with" : "without",
                     call.sm_limit > 0 ? std::to_string(call.sm_limit) : "all",
                     call.eager ? "eager" : "graph", gpu_figures(row.times));
}

nlohmann::ordered_json gpu_row_json(const GpuBenchRow& row) {
  const GpuTimes& times = row.times;
  nlohmann::ordered_json json{{"work", to_string(row.call.work)}};
  json.update(point_json(row.point, row.routing));
  json["reduction"] = row.call.combines() ? nlohmann::ordered_json(to_string(row.call.reduction)) : nullptr;
  json["weights"] = row.call.weighted;
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
  json["p99_us"] = times.seconds.p99 * 1e6;
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

std::string host_bench_table(const std::vector<HostBenchRow>& rows) {
  std::string text =
      fmt::format("Machine: {}, {}, {}. Figures are totals over all ranks.\n", cpu_name(),
                  report::counted(cores(), "core"), report::in_bytes(static_cast<double>(memory_bytes())));
  std::string last;
  for (const HostBenchRow& row : rows) {
    if (const std::string head = heading(row.point); head != last) {
      text += "\n" + head + "\n" + kHostColumns;
      last = head;
    }
    text += host_line(row);
  }
  return text;
}

nlohmann::ordered_json host_bench_json(const std::vector<HostBenchRow>& rows) {
  nlohmann::ordered_json json = report_json("ferry.bench", 2);
  json["points"] = nlohmann::ordered_json::array();
  for (const HostBenchRow& row : rows) json["points"].push_back(host_row_json(row));
  return json;
}

void GpuBenchReport::add(std::vector<GpuBenchRow> more) {
  for (GpuBenchRow& row : more) {
    for (const GpuLimits& one : limits) {
      if (one.ranks == row.point.ranks) row.times.push_bytes_per_second = best_push(one, row.call.sm_limit);
    }
    rows.push_back(std::move(row));
  }
}

std::string gpu_bench_table(const GpuBenchReport& report) {
  std::string text;
  for (const GpuLimits& limits : report.limits) {
    text += fmt::format("{}\n", table_of(limits));
    text += kGpuColumns;
    for (const GpuBenchRow& row : report.rows)
      if (row.point.ranks == limits.ranks) text += gpu_line(row);
    text += "\n";
  }
  return text;
}

nlohmann::ordered_json gpu_bench_json(const GpuBenchReport& report) {
  nlohmann::ordered_json json = report_json("ferry.bench.cuda", 3);
  json["limits"] = nlohmann::ordered_json::array();
  for (const GpuLimits& limits : report.limits) json["limits"].push_back(json_of(limits));
  json["rows"] = nlohmann::ordered_json::array();
  for (const GpuBenchRow& row : report.rows) json["rows"].push_back(gpu_row_json(row));
  return json;
}

}  // namespace ferry::app
