#include "tools/ferry/model/records.hpp"

#include <fmt/core.h>

#include <optional>

#include "ferry/error.hpp"
#include "tools/ferry/common/config.hpp"
#include "tools/ferry/common/input.hpp"

namespace ferry::app {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kLimitsRemedy = "write one with ferry limits --backend cuda --json FILE";
constexpr const char* kBenchRemedy = "write one with ferry bench --backend cuda --json FILE";

// The record's object of the given schema.
const Json& of_schema(const Json& whole, const char* schema, const std::string& path, const char* remedy) {
  const Json& json = whole.contains("measured") ? whole["measured"] : whole;
  const std::string found = json.is_object() ? json.value("schema", std::string()) : std::string();
  if (found == schema) return json;
  throw UsageError(fmt::format("{}: {}, not {}; {}", path,
                               found.empty() ? "no schema" : fmt::format("schema {}", found), schema,
                               remedy));
}

// Runs `read`, and names the file in what the JSON library throws for a member that is missing or has
// another type.
template <class Read>
auto reading(const std::string& path, const char* remedy, const Read& read) {
  try {
    return read();
  } catch (const nlohmann::json::exception& error) {
    throw UsageError(fmt::format("{}: {}; {}", path, error.what(), remedy));
  } catch (const UsageError& error) {
    throw UsageError(std::string(error.what()).starts_with(path)
                         ? error.what()
                         : fmt::format("{}: {}; {}", path, error.what(), remedy));
  }
}

std::optional<Work> work_named(const std::string& name) {
  for (const Work work : {Work::dispatch, Work::dispatch_plan, Work::combine, Work::pair})
    if (name == to_string(work)) return work;
  return std::nullopt;
}

// The busiest rank's rows are in the lower bound. What else the model needs is a mean over the ranks.
Loads loads_from(const Json& row, const ModelCall& call) {
  const double ranks = call.shape.ranks, pairs = row.at("pairs"), remote = row.at("remote_pairs");
  const auto message = static_cast<double>(call.message_bytes()), sum = static_cast<double>(call.row_bytes());
  // Schema version 2 called it the floor.
  const double bound = row.at(row.contains("floor_bytes") ? "floor_bytes" : "lower_bound_bytes");
  Loads loads{.own = (pairs - remote) / ranks,
              .near = remote / ranks,
              .near_routes = 0,
              .routes = row.at("busiest_share").get<double>() * row.at("routes").get<double>()};
  const bool sums = call.call.reduction == Reduction::partial;
  switch (call.call.work) {
    case Work::combine:
      (sums ? loads.near : loads.near_routes) = bound / sum;
      break;
    case Work::pair:
      if (sums)
        loads.near = bound / (message + sum);
      else
        loads.near_routes = (bound - loads.near * message) / sum;
      break;
    default:
      loads.near = bound / message;
  }
  return loads;
}

MeasuredPoint point_from(const Json& row, Work work) {
  MeasuredPoint point;
  ModelCall& call = point.call;
  const std::string form = row.at("form");
  call.call = {
      .work = work,
      .reduction = row.at("reduction").is_null() ? Reduction::partial : reduction_of(row.at("reduction")),
      .weighted = row.at("weights"),
      .eager = row.at("launch") == "eager",
      .in_phases = form != "fused",  // schema version 2: halves
      .sm_limit = row.at("sm_limit")};
  call.format = format_of(row.at("format"));
  call.layout = layout_of(row.at("layout"));
  call.hidden = row.at("hidden");
  call.shape = {.ranks = row.at("ranks"),
                .nodes = 1,
                .tokens = row.at("tokens"),
                .experts = row.at("experts"),
                .top_k = row.at("top_k")};
  if (call.shape.ranks < 1 || call.shape.tokens < 1 || call.hidden < 1)
    throw UsageError(fmt::format("a line of {} ranks, {} tokens and {} columns", call.shape.ranks,
                                 call.shape.tokens, call.hidden));
  point.loads = loads_from(row, call);
  point.router = row.at("router");
  point.us = row.at("p50_us");
  if (!(point.us > 0)) throw UsageError(fmt::format("a line of {} us", point.us));
  return point;
}

}  // namespace

Json read_json_file(const std::string& path, const std::string& remedy) {
  Json json = Json::parse(read_file(path, path), nullptr, false);
  if (json.is_discarded()) throw UsageError(fmt::format("{}: not JSON; {}", path, remedy));
  return json;
}

GpuLimits limits_from(const Json& json) {
  GpuLimits limits;
  limits.gpus = json.at("gpus").get<std::vector<std::string>>();
  limits.ranks = json.at("ranks");
  for (const Json& one : json.at("push")) limits.push.emplace_back(one.at("sms"), one.at("bytes_per_second"));
  limits.flag_seconds = json.at("flag_one_way_seconds");
  limits.barrier_seconds = json.at("barrier_seconds");
  for (const Json& one : json.at("launch")) limits.launch.emplace_back(one.at("blocks"), one.at("seconds"));
  if (limits.gpus.empty() || limits.push.empty() || best_push(limits, 0) <= 0)
    throw UsageError("limits without a GPU or a push rate");
  return limits;
}

GpuLimits read_limits(const std::string& path) {
  const Json whole = read_json_file(path, kLimitsRemedy);
  return reading(path, kLimitsRemedy,
                 [&] { return limits_from(of_schema(whole, "ferry.limits.cuda", path, kLimitsRemedy)); });
}

BenchRecord read_bench(const std::string& path) {
  const Json whole = read_json_file(path, kBenchRemedy);
  return reading(path, kBenchRemedy, [&] {
    const Json& json = of_schema(whole, "ferry.bench.cuda", path, kBenchRemedy);
    BenchRecord record{.path = path, .points = {}, .limits = {}};
    for (const Json& one : json.at("limits"))
      record.limits.push_back(std::make_shared<const GpuLimits>(limits_from(one)));
    for (const Json& row : json.at("rows")) {
      const std::optional<Work> work = work_named(row.at("work"));
      if (!work || row.contains("skipped")) {
        ++record.left_out;
        continue;
      }
      MeasuredPoint point = point_from(row, *work);
      for (const auto& limits : record.limits)
        if (limits->ranks == point.call.shape.ranks) point.limits = limits;
      if (!point.limits)
        throw UsageError(
            fmt::format("{}: no limits of {} ranks; {}", path, point.call.shape.ranks, kBenchRemedy));
      record.points.push_back(std::move(point));
    }
    return record;
  });
}

}  // namespace ferry::app
