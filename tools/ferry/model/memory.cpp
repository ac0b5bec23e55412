#include <fmt/core.h>

#include <algorithm>
#include <iterator>

#include "tools/ferry/common/files.hpp"
#include "tools/ferry/model/report.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

namespace {

using Json = nlohmann::ordered_json;

// Rows that twice an even load brings: of a rank, or with expert_padded of an expert.
std::int64_t twice_an_even_load(const Config& config, int ranks) {
  const std::int64_t tokens = config.max_tokens, top_k = config.top_k;
  if (config.layout == Layout::rank_major) return 2 * tokens * std::min<std::int64_t>(top_k, ranks);
  if (config.layout == Layout::expert_major) return 2 * tokens * top_k;
  return (2 * ranks * tokens * top_k + config.experts - 1) / config.experts;
}

std::string hops_of(const Config& config, const Topology& topology) {
  return topology.nodes() > 1 ? to_string(config.hops) : "-";
}

std::string bytes_line(const Sizes& sizes) {
  std::string line;
  for (const std::int64_t bytes : {sizes.results, sizes.dispatch_staging, sizes.combine_staging,
                                   sizes.messages, sizes.signals, sizes.plans, sizes.total()})
    line += fmt::format(" {:>8}", bytes == 0 ? "-" : report::in_bytes(static_cast<double>(bytes)));
  return line;
}

Json bytes_json(const Sizes& sizes) {
  return {{"results", sizes.results},
          {"dispatch_staging", sizes.dispatch_staging},
          {"combine_staging", sizes.combine_staging},
          {"messages", sizes.messages},
          {"signals", sizes.signals},
          {"plans", sizes.plans},
          {"total", sizes.total()}};
}

}  // namespace

std::vector<MemoryPoint> memory_points(const Config& config, const Topology& topology, bool levers) {
  std::vector<MemoryPoint> points;
  const auto add = [&](const Config& changed, const std::string& lever, const std::string& price) {
    points.push_back({changed, lever, price, size_of(changed, topology)});
  };
  add(config, "", "");
  if (!levers) return points;
  const std::int64_t even = twice_an_even_load(config, topology.ranks());
  if (even < capacity_of(config, topology.ranks())) {
    Config changed = config;
    changed.capacity = even;
    add(changed, fmt::format("capacity = {}", report::with_thousands(even)),
        "twice an even load; more rows are dropped, and reported");
  }
  Config changed = config;
  changed.own_receive_buffers = false;
  add(changed, "own_receive_buffers = false", "received rows lie in memory that you pass");
  if (config.format.value_type() == DType::bf16) {
    changed = config;
    changed.format = Format::fp8_e4m3();
    add(changed, "format fp8", "rows are quantised");
  }
  if (config.max_tokens > 1) {
    changed = config;
    changed.max_tokens = config.max_tokens / 2;
    add(changed, fmt::format("max_tokens = {}", report::with_thousands(changed.max_tokens)),
        "two calls for as many tokens");
  }
  return points;
}

std::string memory_table(const Topology& topology, const std::vector<MemoryPoint>& points) {
  const Config& first = points.front().config;
  std::string text = fmt::format(
      "Memory    of an exchange on rank 0 with the backend {}; all of it is mapped at construction\n"
      "Exchange  {} on {}; E {}, K {}; {}, {}, hidden {}, {}\n\n"
      "tokens hops  results dispatch  combine messages  signals    plans    total\n",
      to_string(first.backend), report::counted(topology.ranks(), "rank"),
      report::counted(topology.nodes(), "node"), first.experts, first.top_k, to_string(first.format),
      to_string(first.layout), first.hidden, to_string(first.reduction));
  for (const MemoryPoint& point : points)
    if (point.lever.empty())
      text += fmt::format("{:>6} {:<4}{}\n", point.config.max_tokens, hops_of(point.config, topology),
                          bytes_line(point.sizes));
  const auto asked = std::find_if(points.rbegin(), points.rend(),
                                  [](const MemoryPoint& point) { return point.lever.empty(); });
  if (asked == points.rbegin()) return text;
  text += fmt::format("\nWhat lowers it, with {} tokens:\n", asked->config.max_tokens);
  for (auto point = asked.base(); point != points.end(); ++point)
    text += fmt::format("{:>10}  {:<28} {}\n", report::in_bytes(static_cast<double>(point->sizes.total())),
                        point->lever, point->price);
  return text;
}

Json memory_json(const Topology& topology, const std::vector<MemoryPoint>& points) {
  Json json = report_json("ferry.model.memory", 1);
  json["exchanges"] = Json::array();
  for (const MemoryPoint& point : points) {
    const Config& config = point.config;
    json["exchanges"].push_back({{"lever", point.lever.empty() ? Json(nullptr) : Json(point.lever)},
                                 {"backend", to_string(config.backend)},
                                 {"ranks", topology.ranks()},
                                 {"nodes", topology.nodes()},
                                 {"hops", to_string(config.hops)},
                                 {"tokens", config.max_tokens},
                                 {"hidden", config.hidden},
                                 {"experts", config.experts},
                                 {"top_k", config.top_k},
                                 {"format", to_string(config.format)},
                                 {"layout", to_string(config.layout)},
                                 {"reduction", to_string(config.reduction)},
                                 {"bytes", bytes_json(point.sizes)}});
  }
  return json;
}

}  // namespace ferry::app
