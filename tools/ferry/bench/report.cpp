#include "tools/ferry/bench/report.hpp"

#include <fmt/core.h>

#include "ferry/version.hpp"
#include "tools/ferry/bench/inputs.hpp"
#include "tools/ferry/common/machine.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

namespace {

std::string kind_of(const BenchPoint& point) {
  return point.processes ? "processes" : "threads";
}

// What stays the same from one line to the next is said once above them.
std::string heading(const BenchPoint& point) {
  return fmt::format("{} ({}), {}, {}, {}, hidden {}", report::counted(point.ranks, "rank"), kind_of(point),
                     to_string(point.config.format), to_string(point.config.layout),
                     to_string(point.config.reduction), point.config.hidden);
}

constexpr const char* kColumns =
    "tokens router                          E/K   N*K all   pairs  remote busiest |"
    "  dispatch      p99     wire       GB/s of memcpy |   combine      p99     wire       GB/s of memcpy |"
    "    memcpy\n";

std::string operation(const BenchOperation& one, double memcpy) {
  return fmt::format("{:>9} {:>8} {:>8} {:>5.1f} GB/s {:>9}", report::in_time(one.seconds.p50 * 1e6),
                     report::in_time(one.seconds.p99 * 1e6), report::in_bytes(one.wire_bytes),
                     one.bytes_per_second() * 1e-9, report::in_percent(one.bytes_per_second() / memcpy));
}

std::string line(const BenchRow& row) {
  const BenchPoint& point = row.point;
  const BenchResult& result = row.result;
  const BenchRouting& routing = result.routing;
  return fmt::format("{:>6} {:<28} {:>4}/{:<2} {:>9} {:>7} {:>7} {:>7} | {} | {} | {:>5.1f} GB/s\n",
                     point.tokens, router_of(point), point.config.experts, point.config.top_k, routing.routes,
                     routing.pairs, routing.remote_pairs, report::in_percent(routing.busiest_share),
                     operation(result.dispatch, result.memcpy_bytes_per_second),
                     operation(result.combine, result.memcpy_bytes_per_second),
                     result.memcpy_bytes_per_second * 1e-9);
}

nlohmann::ordered_json operation_json(const BenchOperation& one, double memcpy) {
  return {{"p50_us", one.seconds.p50 * 1e6},
          {"p99_us", one.seconds.p99 * 1e6},
          {"wire_bytes", one.wire_bytes},
          {"moved_bytes", one.moved_bytes},
          {"bytes_per_second", one.bytes_per_second()},
          {"of_memcpy", one.bytes_per_second() / memcpy}};
}

nlohmann::ordered_json point_json(const BenchRow& row) {
  const BenchPoint& point = row.point;
  const BenchResult& result = row.result;
  nlohmann::ordered_json json = json_of_point(point, result.routing);
  json["group"] = kind_of(point);
  json["reduction"] = to_string(point.config.reduction);
  json["rows"] = result.rows;
  json["rows_checked"] = result.rows_checked;
  json["repetitions"] = point.repetitions;
  json["memcpy_bytes_per_second"] = result.memcpy_bytes_per_second;
  json["dispatch"] = operation_json(result.dispatch, result.memcpy_bytes_per_second);
  json["combine"] = operation_json(result.combine, result.memcpy_bytes_per_second);
  return json;
}

}  // namespace

std::string router_of(const BenchPoint& point) {
  const std::string& name = point.trace->name;
  return name.starts_with("synth:") ? name.substr(0, name.find(':', 6)) : name;
}

nlohmann::ordered_json json_of_point(const BenchPoint& point, const BenchRouting& routing) {
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

std::string bench_table(const std::vector<BenchRow>& rows) {
  std::string text =
      fmt::format("Machine: {}, {}, {}. All figures are of all ranks together.\n", cpu_name(),
                  report::counted(cores(), "core"), report::in_bytes(static_cast<double>(memory_bytes())));
  std::string last;
  for (const BenchRow& row : rows) {
    if (const std::string head = heading(row.point); head != last) {
      text += "\n" + head + "\n" + kColumns;
      last = head;
    }
    text += line(row);
  }
  return text;
}

nlohmann::ordered_json bench_json(const std::vector<BenchRow>& rows) {
  nlohmann::ordered_json json{
      {"schema", "ferry.bench"},
      {"schema_version", 1},
      {"ferry_version", std::string(version())},
      {"command", command_line()},
      {"started_at", utc_now()},
      {"machine", {{"cpu", cpu_name()}, {"cores", cores()}, {"memory_bytes", memory_bytes()}}}};
  json["points"] = nlohmann::ordered_json::array();
  for (const BenchRow& row : rows) json["points"].push_back(point_json(row));
  return json;
}

}  // namespace ferry::app
