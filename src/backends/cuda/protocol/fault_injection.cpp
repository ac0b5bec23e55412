#include "backends/cuda/protocol/fault_injection.hpp"

#include <algorithm>
#include <array>

#include "backends/cuda/protocol/lane_view.hpp"
#include "base/environment.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {
namespace {

// In the order of KernelPoint, from `header` on.
constexpr std::array kPointNames = {"header",   "counts",    "route_values",  "metadata",
                                    "row",      "flag",      "end_of_stream", "poll",
                                    "hop_send", "hop_relay", "hop_receive"};
constexpr std::uint32_t kMaxPauseNs = 20'000;

KernelPoint point_of(const std::string& name) {
  if (name.empty()) return KernelPoint::none;
  const auto found = std::find(kPointNames.begin(), kPointNames.end(), name);
  if (found == kPointNames.end()) {
    std::string names = kPointNames[0];
    for (std::size_t i = 1; i < kPointNames.size(); ++i)
      names += str(i + 1 < kPointNames.size() ? ", " : " or ", kPointNames[i]);
    throw UsageError(str("FERRY_STALL = '", name, "', must be ", names));
  }
  return static_cast<KernelPoint>(static_cast<int>(KernelPoint::header) + (found - kPointNames.begin()));
}

}  // namespace

FaultInjection fault_injection_of(int jitter_percent, const std::string& stall) {
  FaultInjection fault_injection;
  if (jitter_percent > 0) {
    fault_injection.probability = static_cast<std::uint32_t>(std::min(jitter_percent, 100) * 256 / 100);
    fault_injection.max_pause_ns = kMaxPauseNs;
  }
  fault_injection.stall = point_of(stall);
  fault_injection.any = fault_injection.probability > 0 || fault_injection.stall != KernelPoint::none ? 1 : 0;
  return fault_injection;
}

#if FERRY_TEST_HOOKS
bool takes_wide_kernels(int ranks) {
  static const bool all = Environment::read().wide;
  return all || ranks > kNarrowRanks;
}
#endif

}  // namespace ferry::cuda
