#include "tools/ferry/bench/device_report.hpp"

#include <fmt/core.h>

#include <utility>

#include "ferry/version.hpp"
#include "tools/ferry/bench/report.hpp"
#include "tools/ferry/common/machine.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

namespace {

constexpr const char* kColumns =
    "work                  tokens router                  E/K    format layout        reduction weights SMs "
    "launch |"
    "      time       p99 |     wire        GB/s |     floor  x floor |     host\n";

std::string figures(const GpuTimes& times) {
  if (!times.skipped.empty()) return "skipped: " + times.skipped;
  const double floor = times.lower_bound_seconds();
  return fmt::format("{:>9} {:>9} | {:>8} {:>6.1f} GB/s | {:>9} {:>8} | {:>8}",
                     report::in_time(times.seconds.p50 * 1e6), report::in_time(times.seconds.p99 * 1e6),
                     report::in_bytes(times.wire_bytes), times.wire_bytes_per_second() * 1e-9,
                     floor > 0 ? report::in_time(floor * 1e6) : "-",
                     floor > 0 ? fmt::format("{:.2f}", times.seconds.p50 / floor) : "-",
                     times.host_seconds > 0 ? report::in_time(times.host_seconds * 1e6) : "-");
}

std::string line_of(const GpuBenchRow& row) {
  const GpuWork& work = row.work;
  const Config& config = row.point.config;
  const bool moves = work.work != Work::metadata;
  const std::string experts = fmt::format("{}/{}", config.experts, config.top_k);
  return fmt::format("{:<21} {:>6} {:<23} {:<6} {:<6} {:<13} {:<9} {:<7} {:>3} {:<6} | {}\n",
                     fmt::format("{}{}", to_string(work.work), work.in_phases ? ", in_phases" : ""),
                     row.point.tokens, router_of(row.point), experts, moves ? to_string(config.format) : "-",
                     moves ? to_string(config.layout) : "-",
                     work.combines() ? to_string(work.reduction) : "-", work.weighted ? "with" : "without",
                     work.sm_limit > 0 ? std::to_string(work.sm_limit) : "all",
                     work.eager ? "eager" : "graph", figures(row.times));
}

nlohmann::ordered_json json_of(const GpuBenchRow& row) {
  const GpuTimes& times = row.times;
  nlohmann::ordered_json json{{"work", to_string(row.work.work)}};
  json.update(json_of_point(row.point, row.routing));
  json["reduction"] = row.work.combines() ? nlohmann::ordered_json(to_string(row.work.reduction)) : nullptr;
  json["weights"] = row.work.weighted;
  json["sm_limit"] = row.work.sm_limit;
  json["form"] = row.work.in_phases ? "halves" : "fused";
  json["launch"] = row.work.eager ? "eager" : "graph";
  if (!times.skipped.empty()) {
    json["skipped"] = times.skipped;
    return json;
  }
  const double floor = times.lower_bound_seconds();
  json["replays"] = row.point.repetitions;
  json["rows_checked"] = times.rows_checked;
  json["p50_us"] = times.seconds.p50 * 1e6;
  json["p99_us"] = times.seconds.p99 * 1e6;
  json["wire_bytes"] = times.wire_bytes;
  json["wire_bytes_per_second"] = times.wire_bytes_per_second();
  json["floor_bytes"] = times.lower_bound_bytes;
  json["push_bytes_per_second"] = times.push_bytes_per_second;
  json["floor_us"] = floor * 1e6;
  json["of_floor"] = floor > 0 ? nlohmann::ordered_json(times.seconds.p50 / floor) : nullptr;
  json["host_us"] =
      row.work.eager && !row.work.of_nccl() ? nlohmann::ordered_json(times.host_seconds * 1e6) : nullptr;
  return json;
}

}  // namespace

void GpuBenchReport::add(std::vector<GpuBenchRow> more) {
  for (GpuBenchRow& row : more) {
    for (const GpuLimits& one : limits) {
      if (one.ranks == row.point.ranks) row.times.push_bytes_per_second = best_push(one, row.work.sm_limit);
    }
    rows.push_back(std::move(row));
  }
}

std::string gpu_bench_table(const GpuBenchReport& report) {
  std::string text;
  for (const GpuLimits& limits : report.limits) {
    text += fmt::format("{}\n", table_of(limits));
    text += kColumns;
    for (const GpuBenchRow& row : report.rows)
      if (row.point.ranks == limits.ranks) text += line_of(row);
    text += "\n";
  }
  return text;
}

nlohmann::ordered_json gpu_bench_json(const GpuBenchReport& report) {
  nlohmann::ordered_json json{
      {"schema", "ferry.bench.cuda"},
      {"schema_version", 2},
      {"ferry_version", std::string(version())},
      {"command", command_line()},
      {"started_at", utc_now()},
      {"machine", {{"cpu", cpu_name()}, {"cores", cores()}, {"memory_bytes", memory_bytes()}}}};
  json["limits"] = nlohmann::ordered_json::array();
  for (const GpuLimits& limits : report.limits) json["limits"].push_back(json_of(limits));
  json["rows"] = nlohmann::ordered_json::array();
  for (const GpuBenchRow& row : report.rows) json["rows"].push_back(json_of(row));
  return json;
}

}  // namespace ferry::app
