#include "backends/cuda/protocol/fault_injection.hpp"

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
  return static_cast<Point>(static_cast<int>(Point::header) + (found - kPoints.begin()));
}

}  // namespace

FaultInjection fault_injection_of(int jitter_percent, const std::string& stall) {
  FaultInjection fault_injection;
  if (jitter_percent > 0) {
    fault_injection.share = static_cast<std::uint32_t>(std::min(jitter_percent, 100) * 256 / 100);
    fault_injection.nanoseconds = 20000;
  }
  fault_injection.stall = point_of(stall);
  fault_injection.any = fault_injection.share > 0 || fault_injection.stall != Point::none ? 1 : 0;
  return fault_injection;
}

}  // namespace ferry::cuda
