// Finds the model's constants from measured points, and compares its times with measured ones.
#pragma once

#include <string>
#include <vector>

#include "tools/ferry/model/records.hpp"

namespace ferry::app {

// The constants that make the mean squared logarithm of predicted / measured least, from `start` on. A
// constant on which no point depends keeps its value, and its name is in Model::kept. The memory rate comes
// from limits whose ranks share GPUs, where a push reads and writes memory: it is not fitted.
Model calibrate(const GpuLimits& limits, const std::vector<BenchRecord>& records,
                const Constants& start = Constants());

// Relative errors: predicted / measured - 1.
struct PointError {
  const MeasuredPoint* point;
  double us;     // predicted
  double error;  // signed
};

// Errors at all points of the records, except for those that the model was calibrated on.
std::vector<PointError> errors_of(const Model& model, const BenchRecord& record);

struct ErrorSummary {
  std::size_t points = 0;
  double median = 0, worst = 0;  // of the magnitudes
};
ErrorSummary summary_of(std::vector<PointError> errors);

// Largest errors that the model may have.
inline constexpr double kMedianTarget = 0.15, kWorstTarget = 0.30;

}  // namespace ferry::app
