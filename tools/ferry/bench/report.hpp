// What `ferry bench` prints and writes.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tools/ferry/bench/point.hpp"

namespace ferry::app {

struct BenchRow {
  BenchPoint point;
  BenchResult result;
};

// What a point is and what was sent in it, whatever it ran on; how it was timed is for the caller to add.
nlohmann::ordered_json json_of_point(const BenchPoint& point, const BenchRouting& routing);

// A synthesised trace's name without its numbers, which stand in the line anyway.
std::string router_of(const BenchPoint& point);

std::string bench_table(const std::vector<BenchRow>& rows);
nlohmann::ordered_json bench_json(const std::vector<BenchRow>& rows);

}  // namespace ferry::app
