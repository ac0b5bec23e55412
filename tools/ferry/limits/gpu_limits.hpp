// Measures the bandwidth between GPUs and the latency of their signals, for `ferry limits --backend cuda` and
// for the lower bounds of `ferry bench --backend cuda`.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace ferry::app {

struct GpuLimits {
  std::vector<std::string> gpus;
  int ranks = 0;
  std::vector<std::pair<int, double>> push;      // SMs per rank, bytes per second out of each rank
  double flag_seconds = 0, barrier_seconds = 0;  // flag: one way between two ranks
  std::vector<std::pair<int, double>> launch;    // blocks, seconds of an empty kernel in a graph
};

// `sms`: SM counts to push with in addition to the usual ones.
// @throws UnsupportedError  this build or machine has no GPU
GpuLimits measure_gpu_limits(int ranks, const std::vector<int>& sms = {});

// The highest push rate measured with at most `sm_limit` SMs, in bytes per second; 0 means no limit.
double best_push(const GpuLimits& limits, int sm_limit);

std::string table_of(const GpuLimits& limits);
nlohmann::ordered_json json_of(const GpuLimits& limits);

}  // namespace ferry::app
