// The memory of an exchange on GPUs by purpose, and what lowers it: tables and JSON of `ferry model
// --memory`.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "ferry/config.hpp"
#include "ferry/topology.hpp"

namespace ferry::app {

struct MemoryPoint {
  Config config;
  std::string lever;  // what differs from the configuration asked for; empty: nothing
  std::string price;  // of the lever
  Sizes sizes;        // of rank 0
};

// The configuration itself and, if `levers`, those that take less.
std::vector<MemoryPoint> memory_points(const Config& config, const Topology& topology, bool levers);

std::string memory_table(const Topology& topology, const std::vector<MemoryPoint>& points);
nlohmann::ordered_json memory_json(const Topology& topology, const std::vector<MemoryPoint>& points);

}  // namespace ferry::app
