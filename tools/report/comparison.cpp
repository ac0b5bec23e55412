#include "tools/report/parts.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "tools/report/units.hpp"

namespace ferry::report {
namespace {

using Json = nlohmann::ordered_json;
using Pointer = Json::json_pointer;

// A figure that runs are compared by.
struct ComparedFigure {
  const char* path;  // in the report, and below `figures` and `ratios`
  const char* name;
  std::string (*shown)(double);
  const char* stage = nullptr;  // whose times it comes from; null: it does not depend on times
  bool higher_is_better = false;
};

std::string in_count(double value) {
  return with_thousands(std::llround(value));
}

constexpr ComparedFigure kFigures[] = {
    {"/latency/dispatch/p50_us", "dispatch p50", in_time, "dispatch"},
    {"/latency/dispatch/mean_us", "dispatch mean", in_time, "dispatch"},
    {"/latency/experts/p50_us", "experts p50", in_time, "experts"},
    {"/latency/experts/mean_us", "experts mean", in_time, "experts"},
    {"/latency/combine/p50_us", "combine p50", in_time, "combine"},
    {"/latency/combine/mean_us", "combine mean", in_time, "combine"},
    {"/latency/step/p50_us", "step p50", in_time, "step"},
    {"/latency/step/mean_us", "step mean", in_time, "step"},
    {"/tokens_per_second", "tokens per second", in_count, "step", true},
    {"/dispatch/bytes_per_second", "dispatch bandwidth", in_bytes_per_second, "dispatch", true},
    {"/dispatch/share_of_memcpy", "dispatch / memcpy", in_percent, "dispatch", true},
    {"/dispatch/wire_bytes", "dispatch wire bytes", in_bytes},
    {"/combine/bytes_per_second", "combine bandwidth", in_bytes_per_second, "combine", true},
    {"/combine/share_of_memcpy", "combine / memcpy", in_percent, "combine", true},
    {"/combine/wire_bytes", "combine wire bytes", in_bytes},
    {"/load/busiest_rank/over_mean", "busiest rank / mean", in_times},
};

// Follows from other fields, was measured, or is an array that repeats them.
bool says_nothing_new(const std::string& field) {
  return field == "description" || field == "node_of_rank" || field == "memcpy_bytes_per_second";
}

// A field of `group`; where reports leave it out, what that means.
Json setting(const Json& group, const std::string& field) {
  if (group.contains(field)) return group.at(field);
  return field == "input" ? Json("own") : field == "shared_experts" ? Json(0) : Json();
}

void add_differences(const std::string& group, const Json& run, const Json& earlier, Json& differences) {
  Json all = run.at(group);
  all.update(earlier.at(group));
  for (const auto& [field, unused] : all.items()) {
    const Json now = setting(run.at(group), field), before = setting(earlier.at(group), field);
    if (before == now || says_nothing_new(field)) continue;
    differences.push_back({{"field", fmt::format("{}.{}", group, field)}, {"earlier", before}, {"now", now}});
  }
}

// Whether a difference makes the runs do other work, so that neither is better: anything but the seed, the
// machine and how the work is done.
bool is_other_work(const Json& difference) {
  const auto without_seed = [](const Json& recipe) {
    const std::string text = recipe;
    const std::size_t seed = text.find(",seed="), end = text.find(',', seed + 1);
    return seed == std::string::npos ? text
                                     : text.substr(0, seed) + (end < text.size() ? text.substr(end) : "");
  };
  const std::string field = difference.at("field");
  if (field == "workload.recipe")
    return without_seed(difference.at("now")) != without_seed(difference.at("earlier"));
  constexpr const char* kWork[] = {"ranks", "input", "experts", "shared_experts", "top_k", "hidden"};
  return (field.starts_with("workload.") && field != "workload.seed") ||
         std::ranges::any_of(kWork,
                             [&](const char* name) { return field == std::string("configuration.") + name; });
}

// null if either was not measured, or the earlier one is 0.
Json ratio_of(const Json& value, const Json& earlier) {
  if (value.is_null() || earlier.is_null() || earlier.get<double>() == 0) return nullptr;
  return value.get<double>() / earlier.get<double>();
}

// Whether a figure is better or worse. A change of a time no larger than the spread of the run's steps, from
// the median to the 90th percentile, is noise.
Json verdict_of(const Json& run, const Json& ratio, const ComparedFigure& figure) {
  if (ratio.is_null()) return nullptr;
  double noise = 0.005;
  if (figure.stage != nullptr) {
    const Json& latency = run.at("latency").at(figure.stage);
    const double p50 = latency.at("p50_us"), p90 = latency.at("p90_us");
    noise = std::max(0.02, p50 > 0 ? p90 / p50 - 1 : 0);
  }
  const double now = ratio;
  if (now > 0 && std::max(now, 1 / now) - 1 <= noise) return figure.stage != nullptr ? "noise" : "equal";
  return (now > 1) == figure.higher_is_better ? "better" : "worse";
}

std::string shown_or_dash(const Json& value, std::string (*shown)(double)) {
  return value.is_null() ? "-" : shown(value.get<double>());
}

std::string in_words(const Json& value) {
  if (value.is_null()) return "none";
  return value.is_string() ? value.get<std::string>() : value.dump();
}

}  // namespace

Json compare(const Json& run, const Json& earlier) {
  Json differences = Json::array(), figures, ratios, verdicts;
  for (const char* group : {"workload", "configuration", "machine"})
    add_differences(group, run, earlier, differences);
  const bool same_work = std::ranges::none_of(differences, is_other_work);
  for (const ComparedFigure& figure : kFigures) {
    const Pointer path(figure.path);
    figures[path] = earlier.at(path);
    ratios[path] = ratio_of(run.at(path), earlier.at(path));
    verdicts[path] = same_work ? verdict_of(run, ratios[path], figure) : Json();
  }
  return {{"ferry_version", earlier.at("ferry_version")},
          {"command", earlier.at("command")},
          {"started_at", earlier.at("started_at")},
          {"differences", differences},
          {"figures", figures},
          {"ratios", ratios},
          {"same_work", same_work},
          {"verdicts", verdicts}};
}

std::string comparison_table(const Json& run, bool coloured) {
  const Json& compared = run.at("compared");
  std::string text = fmt::format("{:<22}{:>12}{:>12}{:>14}\n", "Compared", "earlier", "now", "now / earlier");
  for (const ComparedFigure& figure : kFigures) {
    const Pointer path(figure.path);
    const Json& verdict = compared.at("verdicts").at(path);
    text += fmt::format(
        "{:<22}{:>12}{:>12}{:>14}", figure.name, shown_or_dash(compared.at("figures").at(path), figure.shown),
        shown_or_dash(run.at(path), figure.shown), shown_or_dash(compared.at("ratios").at(path), in_times));
    if (verdict.is_string())
      text += "  " + toned(verdict, verdict == "worse" ? Tone::bad : Tone::good,
                           coloured && (verdict == "worse" || verdict == "better"));
    text += '\n';
  }
  text += compared.at("same_work")
              ? "          noise: a change no larger than the spread of this run's steps, p50 to p90\n"
              : "          The runs do different work, so no change is called better or worse.\n";
  text += fmt::format("{:<10}ferry {}, started {}\n", "Earlier", in_words(compared.at("ferry_version")),
                      in_words(compared.at("started_at")));
  for (const Json& difference : compared.at("differences"))
    text += fmt::format("{:10}{}: {}, now {}\n", "", in_words(difference.at("field")),
                        in_words(difference.at("earlier")), in_words(difference.at("now")));
  if (compared.at("differences").empty()) text += fmt::format("{:10}the same settings and machine\n", "");
  return text;
}

}  // namespace ferry::report
