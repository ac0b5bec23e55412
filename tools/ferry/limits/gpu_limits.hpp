// `ferry limits --backend cuda`: what it measures, prints and writes.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace ferry::app {

struct DeviceLimits {
  std::vector<std::string> gpus;
  int ranks = 0;
  std::vector<std::pair<int, double>> push;  // SMs of a rank, bytes a second
  double flag_seconds = 0, barrier_seconds = 0;
  std::vector<std::pair<int, double>> launch;  // blocks, seconds
};

// `sms`: numbers of SMs to push with, besides the usual ones.
DeviceLimits measure_device_limits(int ranks, const std::vector<int>& sms = {});

// The best that was seen with at most so many SMs; 0 is no limit.
double best_push(const DeviceLimits& limits, int sm_limit);

std::string table_of(const DeviceLimits& limits);
nlohmann::ordered_json json_of(const DeviceLimits& limits);

}  // namespace ferry::app
