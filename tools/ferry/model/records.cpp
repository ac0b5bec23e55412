#include "tools/ferry/model/records.hpp"

#include <fmt/core.h>

#include <optional>

#include "base/enumerators.hpp"
#include "ferry/error.hpp"
#include "tools/ferry/common/config.hpp"
#include "tools/ferry/common/files.hpp"

namespace ferry::app {

namespace {

using report::JsonField;

constexpr const char* kLimitsRemedy = "write one with ferry limits --backend cuda --json FILE";
constexpr const char* kBenchRemedy = "write one with ferry bench --backend cuda --json FILE";

// The record's object of the given schema.
JsonField of_schema(const JsonField& whole, const char* schema) {
  const JsonField json = whole.has("measured") ? whole.at("measured") : whole;
  require_schema(json, schema);
  return json;
}

std::optional<Work> work_named(const std::string& name) {
  for (const Work work : {Work::dispatch, Work::dispatch_plan, Work::combine, Work::pair})
    if (name == to_string(work)) return work;
  return std::nullopt;
}

// The busiest rank's rows are in the lower bound. What else the model needs is a mean over the ranks.
Loads loads_from(const JsonField& row, const ModelCall& call) {
  const double ranks = call.shape.ranks, pairs = row.at("pairs").as<double>(),
               remote = row.at("remote_pairs").as<double>();
  const auto message = static_cast<double>(call.message_bytes()), sum = static_cast<double>(call.row_bytes());
  // Schema version 2 called it the floor.
  const double bound = row.at(row.has("floor_bytes") ? "floor_bytes" : "lower_bound_bytes").as<double>();
  Loads loads{.own = (pairs - remote) / ranks,
              .near = remote / ranks,
              .near_routes = 0,
              .routes = row.at("busiest_share").as<double>() * row.at("routes").as<double>()};
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

MeasuredPoint point_from(const JsonField& row, Work work) {
  MeasuredPoint point;
  ModelCall& call = point.call;
  const auto text = [&](const char* name) { return row.at(name).as<std::string>(); };
  const auto number = [&](const char* name) { return row.at(name).as<int>(); };
  call.call = {.work = work,
               .reduction = row.at("reduction").is_null()
                                ? Reduction::partial
                                : enumerator_named<Reduction>("reduction", text("reduction")),
               .weighted = row.at("weights").as<bool>(),
               .eager = text("launch") == "eager",
               .in_phases = text("form") != "fused",  // schema version 2: halves
               .sm_limit = number("sm_limit")};
  call.format = format_of(text("format"));
  call.layout = enumerator_named<Layout>("layout", text("layout"));
  call.hidden = number("hidden");
  call.shape = {.ranks = number("ranks"),
                .nodes = 1,
                .tokens = number("tokens"),
                .experts = number("experts"),
                .top_k = number("top_k")};
  if (call.shape.ranks < 1 || call.shape.tokens < 1 || call.hidden < 1)
    throw UsageError(fmt::format("a line of {} ranks, {} tokens and {} columns", call.shape.ranks,
                                 call.shape.tokens, call.hidden));
  point.loads = loads_from(row, call);
  point.router = text("router");
  point.us = row.at("p50_us").as<double>();
  if (!(point.us > 0)) throw UsageError(fmt::format("a line of {} us", point.us));
  return point;
}

}  // namespace

GpuLimits limits_from(const JsonField& json) {
  GpuLimits limits;
  limits.gpus = json.at("gpus").as<std::vector<std::string>>();
  limits.ranks = json.at("ranks").as<int>();
  const JsonField push = json.at("push"), launch = json.at("launch");
  for (std::size_t i = 0; i < push.size(); ++i)
    limits.push.emplace_back(push[i].at("sms").as<int>(), push[i].at("bytes_per_second").as<double>());
  limits.flag_seconds = json.at("flag_one_way_seconds").as<double>();
  limits.barrier_seconds = json.at("barrier_seconds").as<double>();
  for (std::size_t i = 0; i < launch.size(); ++i)
    limits.launch.emplace_back(launch[i].at("blocks").as<int>(), launch[i].at("seconds").as<double>());
  if (limits.gpus.empty() || limits.push.empty() || best_push(limits, 0) <= 0)
    throw UsageError("limits without a GPU or a push rate");
  return limits;
}

GpuLimits read_limits(const std::string& path) {
  return read_json_file(path, path, kLimitsRemedy, [&](const nlohmann::ordered_json& whole) {
    return limits_from(of_schema(JsonField(whole), "ferry.limits.cuda"));
  });
}

BenchRecord read_bench(const std::string& path) {
  return read_json_file(path, path, kBenchRemedy, [&](const nlohmann::ordered_json& whole) {
    const JsonField json = of_schema(JsonField(whole), "ferry.bench.cuda"), limits = json.at("limits"),
                    rows = json.at("rows");
    BenchRecord record{.path = path, .points = {}, .limits = {}};
    for (std::size_t i = 0; i < limits.size(); ++i)
      record.limits.push_back(std::make_shared<const GpuLimits>(limits_from(limits[i])));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const JsonField row = rows[i];
      const std::optional<Work> work = work_named(row.at("work").as<std::string>());
      if (!work || row.has("skipped")) {
        ++record.left_out;
        continue;
      }
      MeasuredPoint point = point_from(row, *work);
      for (const auto& each : record.limits)
        if (each->ranks == point.call.shape.ranks) point.limits = each;
      if (!point.limits) throw UsageError(fmt::format("no limits of {} ranks", point.call.shape.ranks));
      record.points.push_back(std::move(point));
    }
    return record;
  });
}

}  // namespace ferry::app
