#include "tools/report/forms.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "tools/report/parts.hpp"
#include "tools/report/summary.hpp"

namespace ferry::report {
namespace {

using Json = nlohmann::ordered_json;

// Names come from the command line and may hold any bytes, but JSON must be UTF-8.
std::string utf8(const std::string& text) {
  return Json::parse(Json(text).dump(-1, ' ', false, Json::error_handler_t::replace)).get<std::string>();
}

template <class T>
Json or_null(const std::optional<T>& value) {
  return value ? Json(*value) : Json(nullptr);
}

}  // namespace

double to_nanosecond(double us) {
  return std::round(us * 1000.0) / 1000.0;
}

Json json_of(const TraceUse& workload) {
  // As a string: the seed has 64 bits, and the page's script would keep 53 of a number.
  const Json seed = workload.seed ? Json(std::to_string(*workload.seed)) : Json(nullptr);
  return {{"trace", utf8(workload.trace)},
          {"synthesised", workload.synthesised},
          {"description", utf8(workload.description)},
          {"recipe", workload.recipe},
          {"seed", seed},
          {"layers", workload.layers},
          {"tokens", workload.tokens},
          {"tokens_per_rank", workload.tokens_per_rank},
          {"steps", workload.steps}};
}

Json json_of(const Configuration& configuration) {
  Json json = {{"backend", configuration.backend},
               {"ranks", configuration.ranks},
               {"group", configuration.group},
               {"nodes", configuration.nodes},
               {"simulated_nodes", configuration.simulated_nodes},
               {"node_of_rank", configuration.node_of_rank},
               {"hops", configuration.hops},
               {"experts", configuration.experts},
               {"top_k", configuration.top_k},
               {"hidden", configuration.hidden},
               {"max_tokens", configuration.max_tokens},
               {"layout", configuration.layout},
               {"format", configuration.format},
               {"reduction", configuration.reduction},
               {"reduction_level", configuration.reduction_level},
               {"combine_type", configuration.combine_type},
               {"expert_function", configuration.expert_function}};
  if (configuration.input != "own") json["input"] = configuration.input;
  if (configuration.shared_experts > 0) json["shared_experts"] = configuration.shared_experts;
  return json;
}

Json json_of(const Machine& machine) {
  return {{"cpu", machine.cpu},
          {"cores", machine.cores},
          {"memory_bytes", machine.memory_bytes},
          {"memcpy_threads", machine.memcpy_threads},
          {"memcpy_bytes_per_second", machine.memcpy_bytes_per_second}};
}

Json json_of(const std::vector<Check>& checks) {
  Json list = Json::array();
  for (const Check& check : checks) {
    list.push_back({{"name", check.name},
                    {"passed", check.passed},
                    {"compared", check.compared},
                    {"wrong", check.wrong},
                    {"error", or_null(check.error)},
                    {"tolerance", or_null(check.tolerance)},
                    {"detail", check.detail}});
  }
  return {
      {"passed", std::ranges::count(checks, true, &Check::passed)}, {"total", checks.size()}, {"list", list}};
}

namespace {

Json json_of(const Latency& latency) {
  return {{"mean_us", to_nanosecond(latency.mean_us)},
          {"p50_us", to_nanosecond(latency.p50_us)},
          {"p90_us", to_nanosecond(latency.p90_us)},
          {"p99_us", latency.p99_us ? Json(to_nanosecond(*latency.p99_us)) : Json(nullptr)},
          {"max_us", to_nanosecond(latency.max_us)}};
}

Json json_of(const StepShares& shares) {
  return {{"dispatch_us", to_nanosecond(shares.dispatch_us)},
          {"experts_us", to_nanosecond(shares.experts_us)},
          {"combine_us", to_nanosecond(shares.combine_us)},
          {"waiting_us", to_nanosecond(shares.waiting_us)},
          {"step_us", to_nanosecond(shares.step_us)}};
}

Json latency_json(const Summary& summary) {
  Json json;
  for (const StepStage stage : kStages) json[to_string(stage)] = json_of(summary[stage]);
  json["step"] = json_of(summary.step);
  return json;
}

// `bytes` [n][n] as an array of rows.
Json matrix_of(const std::vector<std::int64_t>& bytes, std::size_t n) {
  Json matrix = Json::array();
  for (auto row = bytes.begin(); row != bytes.end(); row += static_cast<std::ptrdiff_t>(n)) {
    matrix.push_back(Json(std::vector<std::int64_t>(row, row + static_cast<std::ptrdiff_t>(n))));
  }
  return matrix;
}

Json json_of(const Traffic& traffic, const Flow& flow, int nodes) {
  return {{"wire_bytes", traffic.wire_bytes},
          {"messages", traffic.messages},
          {"local_bytes", flow.local_bytes},
          {"moved_bytes", traffic.moved_bytes},
          {"bytes_per_second", flow.bytes_per_second},
          {"share_of_memcpy", or_null(flow.share_of_memcpy)},
          {"sent_bytes", flow.sent_bytes},
          {"received_bytes", flow.received_bytes},
          {"traffic_bytes", matrix_of(traffic.traffic_bytes, flow.sent_bytes.size())},
          {"between_nodes_bytes", flow.between_nodes_bytes},
          {"node_traffic_bytes", matrix_of(flow.node_traffic_bytes, static_cast<std::size_t>(nodes))}};
}

Json json_of(const Busiest& busiest) {
  return {{"index", busiest.index}, {"mean", busiest.mean}, {"over_mean", busiest.over_mean}};
}

Json json_of(const Load& load, const Summary& summary) {
  Json json = {{"dropped_routes", load.dropped_routes},     {"idle_experts", summary.idle_experts},
               {"busiest_expert", json_of(summary.expert)}, {"busiest_rank", json_of(summary.rank)},
               {"rows_per_rank", load.rows_per_rank},       {"routes_per_expert", load.routes_per_expert},
               {"rank_of_expert", load.rank_of_expert}};
  if (load.shared_rows_per_rank > 0) json["shared_rows_per_rank"] = load.shared_rows_per_rank;
  return json;
}

Json timeline_json(const RunReport& run, int most_steps) {
  const int shown = std::min(most_steps, run.workload.steps);
  Json steps = Json::array();
  for (int step = 0; step < shown; ++step) {
    Json ranks = Json::array();
    for (int rank = 0; rank < run.configuration.ranks; ++rank) {
      Json spans = Json::array();
      for (const StepStage stage : kStages) {
        const Span& span = run.at(step, rank)[stage];
        spans.push_back({span.begin_us, span.end_us});
      }
      ranks.push_back(spans);
    }
    steps.push_back(ranks);
  }
  return {{"steps", shown}, {"spans_us", steps}};
}

// Rounds the times first, so that all figures follow from the times as written.
RunReport in_nanoseconds(RunReport run) {
  for (StepTimes& times : run.times) {
    for (Span& span : times.stages) span = {to_nanosecond(span.begin_us), to_nanosecond(span.end_us)};
  }
  return run;
}

}  // namespace

Json to_json(const RunReport& given, int most_steps) {
  const RunReport run = in_nanoseconds(given);
  const Summary summary = summarise(run);
  Json json{{"schema", kSchemaName},
            {"schema_version", kSchemaVersion},
            {"ferry_version", run.ferry_version},
            {"command", utf8(run.command)},
            {"started_at", run.started_at},
            {"workload", json_of(run.workload)},
            {"configuration", json_of(run.configuration)},
            {"machine", json_of(run.machine)},
            {"checks", json_of(run.checks)},
            {"tokens_per_second", summary.tokens_per_second},
            {"latency", latency_json(summary)},
            {"mean_step", json_of(summary.shares)},
            {"dispatch", json_of(run.dispatch, summary.dispatch, run.configuration.nodes)},
            {"combine", json_of(run.combine, summary.combine, run.configuration.nodes)},
            {"load", json_of(run.load, summary)},
            {"timeline", timeline_json(run, most_steps)}};
  if (run.compared_with) json["compared"] = compare(json, to_json(*run.compared_with, 1));
  return json;
}

}  // namespace ferry::report
