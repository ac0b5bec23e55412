// What `ferry bench --backend cuda` prints and writes.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tools/ferry/bench/device_work.hpp"
#include "tools/ferry/limits/gpu_limits.hpp"

namespace ferry::app {

struct DeviceReport {
  std::vector<DeviceLimits> limits;  // of the same run, by number of ranks
  std::vector<DeviceRow> rows;

  // Rows take what could be pushed from the limits for their number of ranks.
  void add(std::vector<DeviceRow> more);
};

std::string device_bench_table(const DeviceReport& report);
nlohmann::ordered_json device_bench_json(const DeviceReport& report);

}  // namespace ferry::app
