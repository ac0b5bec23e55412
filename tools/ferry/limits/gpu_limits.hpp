// Measures the bandwidth between GPUs and the latency of their signals, for `ferry limits --backend cuda` and
// for the lower bounds of `ferry bench --backend cuda`.
#pragma once

#include <nlohmann/json.hpp>

#include <string>
#include <utility>
#include <vector>

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

// ---- kernels that measure what GPUs can move and how fast they signal; a rank's GPU is its number modulo
// the number of GPUs.

// Names of the GPUs.
// @throws UnsupportedError  this build or machine has none
std::vector<std::string> gpu_names();

// Number of SMs of the first GPU.
int gpu_sms();

// Bytes per second out of the slowest rank while all ranks write to all others at once, with `sms` SMs each.
// With one rank 0, because nothing leaves it.
double measure_push(int ranks, int sms);

// Seconds for a flag to travel one way between two ranks: half of a round trip.
double measure_gpu_flag();

// Seconds for a barrier of all ranks inside a kernel.
double measure_gpu_barrier(int ranks);

// Seconds of an empty kernel of `blocks` blocks in a graph.
double measure_launch(int blocks);

// Version and path of the library that the backend nvshmem would use.
// @throws UnsupportedError  there is none, or no module for it
std::string found_nvshmem();

}  // namespace ferry::app
