// What `ferry bench --backend cuda` prints and writes.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tools/ferry/bench/device_work.hpp"
#include "tools/ferry/limits/gpu_limits.hpp"

namespace ferry::app {

struct GpuBenchReport {
  std::vector<GpuLimits> limits;  // of the same run, by number of ranks
  std::vector<GpuBenchRow> rows;

  // Rows take what could be pushed from the limits for their number of ranks.
  void add(std::vector<GpuBenchRow> more);
};

std::string gpu_bench_table(const GpuBenchReport& report);
nlohmann::ordered_json gpu_bench_json(const GpuBenchReport& report);

}  // namespace ferry::app
