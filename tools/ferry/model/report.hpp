// The tables and JSON of `ferry model`. Lines have at most 100 columns unless a name is longer.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "ferry/config.hpp"
#include "ferry/topology.hpp"
#include "tools/ferry/model/calibration.hpp"

namespace ferry::app {

// ---- times of given calls

struct PredictedCall {
  ModelCall call;
  std::string router;
  Cost cost;
  LinkBytes bytes;
};

std::string times_table(const Model& model, const Network* network, const std::vector<PredictedCall>& calls);
nlohmann::ordered_json times_json(const Model& model, const Network* network,
                                  const std::vector<PredictedCall>& calls);

// ---- EP16 to EP1024

// A dispatch and a combine on one network, in one hop and in two.
struct ScalePoint {
  int ranks = 0, nodes = 0, experts = 0, tokens = 0;
  struct Times {
    Cost dispatch, combine;
    LinkBytes dispatched, combined;
  } one, two;
};

struct ScaleTable {
  Network network;
  int node_ranks = 0;
  std::string what;  // format, routing, shape
  std::vector<ScalePoint> points;
};

std::string scale_text(const Model& model, const std::vector<ScaleTable>& tables);
nlohmann::ordered_json scale_json(const Model& model, const std::vector<ScaleTable>& tables);

// ---- constants and errors

std::string constants_table(const Model& model);

struct CheckedRecord {
  std::string path;
  std::vector<PointError> errors;
  std::size_t calibrated = 0;  // points that the model was calibrated on
  int left_out = 0;
};

std::string check_table(const std::vector<CheckedRecord>& records);
nlohmann::ordered_json check_json(const Model& model, const std::vector<CheckedRecord>& records);

// ---- memory of an exchange on GPUs by purpose, and what lowers it (memory.cpp)

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
