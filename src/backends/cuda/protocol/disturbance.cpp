#include "backends/cuda/protocol/disturbance.hpp"

#include <algorithm>
#include <array>

#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {
namespace {

// In the order of Point, from letter on.
constexpr std::array kPoints = {"letter", "values", "notes", "row", "flag", "last", "poll"};

Point point_of(const std::string& name) {
  if (name.empty()) return Point::none;
  const auto found = std::find(kPoints.begin(), kPoints.end(), name);
  if (found == kPoints.end()) {
    std::string names = kPoints[0];
    for (std::size_t i = 1; i < kPoints.size(); ++i)
      names += str(i + 1 < kPoints.size() ? ", " : " or ", kPoints[i]);
    throw UsageError(str("FERRY_STALL = '", name, "', must be ", names));
  }
  return static_cast<Point>(static_cast<int>(Point::letter) + (found - kPoints.begin()));
}

}  // namespace

Disturbance disturbance_of(int jitter_percent, const std::string& stall) {
  Disturbance disturbance;
  if (jitter_percent > 0) {
    disturbance.share = static_cast<std::uint32_t>(std::min(jitter_percent, 100) * 256 / 100);
    disturbance.nanoseconds = 20000;
  }
  disturbance.stall = point_of(stall);
  disturbance.any = disturbance.share > 0 || disturbance.stall != Point::none ? 1 : 0;
  return disturbance;
}

}  // namespace ferry::cuda
