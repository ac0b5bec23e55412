#include "apps/ferry/bench_device_report.hpp"

#include <fmt/core.h>

#include "apps/ferry/device_limits.hpp"
#include "apps/ferry/machine.hpp"
#include "ferry/version.hpp"
#include "report/units.hpp"

namespace ferry::app {

namespace {

std::string heading(const BenchPoint& point) {
  return fmt::format("{}, {}, {}, {}, hidden {}, {}", report::counted(point.ranks, "rank"),
                     to_string(point.config.format), to_string(point.config.layout),
                     to_string(point.config.reduction), point.config.hidden,
                     point.sm_limit > 0 ? report::counted(point.sm_limit, "SM") : "all SMs");
}

constexpr const char* kColumns =
    "tokens router                   E/K |  dispatch      p99    floor  x floor    wire     host |"
    "   combine      p99    floor  x floor    wire     host |     push\n";

std::string times(const BenchOperation& one) {
  const std::string ratio =
      one.floor_seconds > 0 ? fmt::format("{:.2f}", one.seconds.p50 / one.floor_seconds) : "-";
  return fmt::format("{:>9} {:>8} {:>8} {:>8} {:>8} {:>8}", report::in_time(one.seconds.p50 * 1e6),
                     report::in_time(one.seconds.p99 * 1e6), report::in_time(one.floor_seconds * 1e6), ratio,
                     report::in_bytes(one.wire_bytes), report::in_time(one.host_seconds * 1e6));
}

nlohmann::ordered_json json_of(const BenchOperation& one) {
  return {{"p50_us", one.seconds.p50 * 1e6},
          {"p99_us", one.seconds.p99 * 1e6},
          {"floor_us", one.floor_seconds * 1e6},
          {"wire_bytes", one.wire_bytes},
          {"host_us", one.host_seconds * 1e6}};
}

nlohmann::ordered_json json_of(const BenchRow& row) {
  nlohmann::ordered_json json = json_of_point(row);
  json["sm_limit"] = row.point.sm_limit;
  json["replays"] = row.point.repetitions;
  json["push_bytes_per_second"] = row.result.push_bytes_per_second;
  json["dispatch"] = json_of(row.result.dispatch);
  json["combine"] = json_of(row.result.combine);
  return json;
}

}  // namespace

std::string device_bench_table(const std::vector<BenchRow>& rows) {
  const std::vector<std::string> gpus = gpu_names();
  std::string text =
      fmt::format("Machine: {} x {}. Ranks take the GPUs in turn.\n", gpus.size(), gpus.front());
  std::string last;
  for (const BenchRow& row : rows) {
    const BenchPoint& point = row.point;
    if (const std::string head = heading(point); head != last) {
      text += "\n" + head + "\n" + kColumns;
      last = head;
    }
    const std::string& name = point.trace->name;
    text +=
        fmt::format("{:>6} {:<20} {:>5}/{:<2} | {} | {} | {:>8}\n", point.tokens,
                    name.starts_with("synth:") ? name.substr(0, name.find(':', 6)) : name,
                    point.config.experts, point.config.top_k, times(row.result.dispatch),
                    times(row.result.combine), report::in_bytes_per_second(row.result.push_bytes_per_second));
  }
  return text;
}

nlohmann::ordered_json device_bench_json(const std::vector<BenchRow>& rows) {
  nlohmann::ordered_json json{{"schema", "ferry.bench.cuda"},
                              {"schema_version", 1},
                              {"ferry_version", std::string(version())},
                              {"command", command_line()},
                              {"started_at", utc_now()},
                              {"machine", {{"gpus", gpu_names()}, {"cpu", cpu_name()}, {"cores", cores()}}}};
  json["points"] = nlohmann::ordered_json::array();
  for (const BenchRow& row : rows) json["points"].push_back(json_of(row));
  return json;
}

}  // namespace ferry::app
