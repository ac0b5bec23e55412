#include "tools/ferry/model/calibration.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

namespace ferry::app {

namespace {

// Pulls a constant to its start, but less than any point that depends on it.
constexpr double kPull = 1e-5;
constexpr int kRounds = 200;
constexpr double kFirstStep = 0.2, kLastStep = 1e-7;  // of a constant's logarithm

double predicted(const MeasuredPoint& point, const Constants& constants) {
  return cost_of(point.call, point.loads, constants, *point.limits).total;
}

class Fit {
 public:
  Fit(std::vector<const MeasuredPoint*> points, const Constants& start)
      : points_(std::move(points)), start_(start), constants_(start) {}

  // Moves each constant in turn, by a step that grows after a success and shrinks after a failure.
  Constants run() {
    std::array<double, kConstants> step{};
    step.fill(kFirstStep);
    double best = loss(constants_);
    for (int round = 0; round < kRounds; ++round) {
      for (std::size_t i = 0; i < kConstants; ++i) {
        if (i == static_cast<std::size_t>(Constant::memory)) continue;
        if (std::abs(step[i]) < kLastStep) continue;
        step[i] *= improved(i, step[i], best) ? 1.5 : improved(i, -step[i], best) ? -1.5 : 0.5;
      }
    }
    return constants_;
  }

  // Names of the constants on which no point depends.
  std::vector<std::string> undetermined() const {
    std::vector<std::string> names;
    for (const ConstantEntry& entry : constant_table()) {
      Constants moved = constants_;
      moved[entry.constant] *= 1.5;
      const auto depends = [&](const MeasuredPoint* point) {
        return std::abs(predicted(*point, moved) / predicted(*point, constants_) - 1) > 1e-3;
      };
      if (std::none_of(points_.begin(), points_.end(), depends)) names.emplace_back(entry.name);
    }
    return names;
  }

 private:
  double loss(const Constants& constants) const {
    double sum = 0, pull = 0;
    for (const MeasuredPoint* point : points_)
      sum += std::pow(std::log(predicted(*point, constants) / point->us), 2);
    for (const ConstantEntry& entry : constant_table())
      pull += std::pow(std::log(constants[entry.constant] / start_[entry.constant]), 2);
    return sum / static_cast<double>(points_.size()) + kPull * pull;
  }

  bool improved(std::size_t i, double step, double& best) {
    Constants moved = constants_;
    moved[static_cast<Constant>(i)] *= std::exp(step);
    const double its = loss(moved);
    if (its >= best) return false;
    best = its;
    constants_ = moved;
    return true;
  }

  std::vector<const MeasuredPoint*> points_;
  Constants start_, constants_;
};

// GB/s that a GPU reads and writes when the ranks on it push to each other; 0 if they do not share it.
double memory_rate(const GpuLimits& limits) {
  const auto gpus = static_cast<int>(limits.gpus.size());
  if (gpus != 1 || limits.ranks <= gpus) return 0;
  return 2e-9 * limits.ranks * best_push(limits, 0);
}

bool calibrated_on(const Model& model, const MeasuredPoint& point) {
  return std::any_of(model.calibrated.begin(), model.calibrated.end(), [&](const CalibratedPoint& used) {
    return used.work == to_string(point.call.call.work) && used.ranks == point.call.shape.ranks &&
           used.tokens == point.call.shape.tokens && std::abs(used.us / point.us - 1) < 1e-8;
  });
}

}  // namespace

Model calibrate(const GpuLimits& limits, const std::vector<BenchRecord>& records, const Constants& start) {
  Model model;
  model.limits = limits;
  model.constants = start;
  double rate = memory_rate(limits);
  std::vector<const MeasuredPoint*> points;
  for (const BenchRecord& record : records) {
    model.source += (model.source.empty() ? "" : ", ") + record.path;
    for (const auto& its : record.limits) rate = std::max(rate, memory_rate(*its));
    for (const MeasuredPoint& point : record.points) {
      points.push_back(&point);
      model.calibrated.push_back(
          {to_string(point.call.call.work), point.call.shape.ranks, point.call.shape.tokens, point.us});
    }
  }
  if (rate > 0) model.constants[Constant::memory] = rate;
  Fit fit(points, model.constants);
  if (!points.empty()) model.constants = fit.run();
  model.kept = fit.undetermined();
  if (rate > 0)
    std::erase(model.kept, "memory");
  else if (std::find(model.kept.begin(), model.kept.end(), "memory") == model.kept.end())
    model.kept.emplace_back("memory");
  return model;
}

std::vector<PointError> errors_of(const Model& model, const BenchRecord& record) {
  std::vector<PointError> errors;
  for (const MeasuredPoint& point : record.points) {
    if (calibrated_on(model, point)) continue;
    const double us = predicted(point, model.constants);
    errors.push_back({&point, us, us / point.us - 1});
  }
  return errors;
}

ErrorSummary summary_of(std::vector<PointError> errors) {
  if (errors.empty()) return {};
  const auto smaller = [](const PointError& a, const PointError& b) {
    return std::abs(a.error) < std::abs(b.error);
  };
  std::sort(errors.begin(), errors.end(), smaller);
  return {.points = errors.size(),
          .median = std::abs(errors[errors.size() / 2].error),
          .worst = std::abs(errors.back().error)};
}

}  // namespace ferry::app
