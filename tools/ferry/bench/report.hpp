// The table and the JSON of `ferry bench`.
#pragma once

#include <span>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tools/ferry/bench/engine_bench.hpp"
#include "tools/ferry/bench/point.hpp"
#include "tools/ferry/limits/gpu_limits.hpp"

namespace ferry::app {

// The fields with which every report of `ferry bench` begins.
nlohmann::ordered_json bench_json(const char* schema, int schema_version);

// A row in the table. Rows of one heading stand below it.
struct BenchLines {
  std::string heading, lines;
};

BenchLines lines_of(const HostBenchRow& row);
BenchLines lines_of(const GpuBenchRow& row);
BenchLines lines_of(const EngineBenchRow& row);

nlohmann::ordered_json host_bench_json(const std::vector<HostBenchRow>& rows);

struct GpuBenchReport {
  std::vector<GpuLimits> limits;  // measured in the same run, one for each number of ranks
  std::vector<GpuBenchRow> rows;

  // Appends rows, fills in their push rate from the limits for their number of ranks, and returns them.
  std::span<const GpuBenchRow> add(std::vector<GpuBenchRow> more);
};

nlohmann::ordered_json gpu_bench_json(const GpuBenchReport& report);
nlohmann::ordered_json engine_bench_json(const std::vector<EngineBenchRow>& rows);

}  // namespace ferry::app
