// Parts that the tables and JSON files of `ferry bench` share.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "tools/ferry/bench/point.hpp"

namespace ferry::app {

// The trace's name. A synthesised trace's parameters are left out, because the line shows them.
std::string router_of(const BenchPoint& point);

// Lines by their heading. Sections follow in the order of their first lines, so that a sweep's lines are
// together.
class Sections {
 public:
  explicit Sections(const char* columns) : columns_(columns) {}

  void add(const std::string& heading, const std::string& lines);
  std::string text() const;

 private:
  struct Section {
    explicit Section(std::string text) : heading(std::move(text)) {}
    std::string heading;
    std::string lines{};
  };
  const char* columns_;
  std::vector<Section> sections_{};
};

// The fields of a point.
nlohmann::ordered_json point_json(const BenchPoint& point, const BenchRouting& routing);

}  // namespace ferry::app
