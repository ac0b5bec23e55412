#include "tools/ferry/bench/report_parts.hpp"

#include <algorithm>

#include "tools/ferry/bench/inputs.hpp"

namespace ferry::app {

std::string router_of(const BenchPoint& point) {
  const std::string& name = point.trace->name;
  return name.starts_with("synth:") ? name.substr(0, name.find(':', 6)) : name;
}

void Sections::add(const std::string& heading, const std::string& lines) {
  const auto same = [&](const Section& one) { return one.heading == heading; };
  const auto found = std::find_if(sections_.begin(), sections_.end(), same);
  (found == sections_.end() ? sections_.emplace_back(heading) : *found).lines += lines;
}

std::string Sections::text() const {
  std::string text;
  for (const Section& one : sections_) text += "\n" + one.heading + columns_ + one.lines;
  return text;
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

}  // namespace ferry::app
