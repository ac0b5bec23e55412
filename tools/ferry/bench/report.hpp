// The table and the JSON of `ferry bench`.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tools/ferry/bench/point.hpp"
#include "tools/ferry/limits/gpu_limits.hpp"

namespace ferry::app {

// The fields with which every report of `ferry bench` begins.
nlohmann::ordered_json report_json(const char* schema, int version_number);

// "Machine: ", and what the CPU figures depend on.
std::string machine_line();

std::string host_bench_table(const std::vector<HostBenchRow>& rows);
nlohmann::ordered_json host_bench_json(const std::vector<HostBenchRow>& rows);

struct GpuBenchReport {
  std::vector<GpuLimits> limits;  // measured in the same run, one for each number of ranks
  std::vector<GpuBenchRow> rows;

  // Appends rows, and fills in their push rate from the limits for their number of ranks.
  void add(std::vector<GpuBenchRow> more);
};

std::string gpu_bench_table(const GpuBenchReport& report);
nlohmann::ordered_json gpu_bench_json(const GpuBenchReport& report);

}  // namespace ferry::app
