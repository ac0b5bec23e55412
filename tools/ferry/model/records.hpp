// Reads what `ferry limits --backend cuda --json` and `ferry bench --backend cuda --json` have written, also
// inside the records of scripts/gpu (member `measured`).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tools/ferry/model/cost.hpp"
#include "tools/report/json_field.hpp"

namespace ferry::app {

struct MeasuredPoint {
  ModelCall call;
  Loads loads;  // from the record's own counts, so that no trace is needed
  std::string router;
  double us = 0;  // median
  std::shared_ptr<const GpuLimits> limits;
};

struct BenchRecord {
  std::string path;
  std::vector<MeasuredPoint> points;
  std::vector<std::shared_ptr<const GpuLimits>> limits;  // one for each number of ranks
  int left_out = 0;                                      // lines that the model has no times of
};

// Both throw UsageError for a file that cannot be read, and, with the remedy, for one that is no such record.
GpuLimits read_limits(const std::string& path);
BenchRecord read_bench(const std::string& path);

// From an object as json_of(GpuLimits) makes it.
GpuLimits limits_from(const report::JsonField& json);

}  // namespace ferry::app
