#include <fmt/core.h>

#include <algorithm>

#include "tools/ferry/bench/engine_bench.hpp"
#include "tools/ferry/bench/report.hpp"
#include "tools/ferry/bench/report_parts.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

namespace {

std::string engine_heading(const EngineBenchRow& row) {
  const Config& config = row.point.config;
  return fmt::format("{} on {} ({}{}), {}, {} hop{}, {}, {}, {}\n{}, E {}, K {}, hidden {}\n",
                     report::counted(row.point.ranks, "rank"), report::counted(row.nodes, "host"), row.engine,
                     row.registers ? ", registered" : "", row.gpu, config.hops == Hops::two ? "two" : "one",
                     config.hops == Hops::two ? "s" : "", to_string(config.format), to_string(config.layout),
                     to_string(config.reduction), router_of(row.point), config.experts, config.top_k,
                     config.hidden);
}

constexpr const char* kEngineColumns =
    "tokens  call         time     least      most     wire all-to-all     copy    bound ratio\n";

std::string engine_line(const EngineBenchRow& row, const char* name, const EngineCall& call) {
  const auto time = [](double seconds) { return seconds > 0 ? report::in_time(seconds * 1e6) : "-"; };
  return fmt::format("{:>6}  {:<8} {:>8} {:>9} {:>9} {:>8} {:>10} {:>8} {:>8} {:>5}\n", row.point.tokens,
                     name, time(call.call.p50), time(call.call.least), time(call.call.most),
                     report::in_bytes(call.wire_bytes), time(call.all_to_all.p50), time(call.copy.p50),
                     time(call.bound_seconds()),
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
  return {.p50 = percentile(seconds, 0.5), .least = *least, .most = *most};
}

std::string engine_bench_table(const std::vector<EngineBenchRow>& rows) {
  Sections sections(kEngineColumns);
  for (const EngineBenchRow& row : rows)
    sections.add(engine_heading(row),
                 engine_line(row, "dispatch", row.dispatch) + engine_line(row, "combine", row.combine));
  return machine_line() + "\nTimes are of the slowest rank, wire bytes of a rank.\n" + sections.text();
}

nlohmann::ordered_json engine_bench_json(const std::vector<EngineBenchRow>& rows) {
  nlohmann::ordered_json json = report_json("ferry.bench.engine", 1);
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
