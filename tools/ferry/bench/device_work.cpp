#include "tools/ferry/bench/device_work.hpp"

namespace ferry::app {

const char* to_string(Work work) {
  constexpr const char* kNames[] = {"dispatch", "dispatch_plan", "combine",  "pair",
                                    "metadata", "nccl",          "nccl_rows"};
  return kNames[static_cast<int>(work)];
}

std::optional<GpuWork> normalised(GpuWork work, Layout layout) {
  const bool sums = layout == Layout::rank_major;  // rows are sums over the rank's experts already
  if (work.combines() && sums && work.reduction != Reduction::partial) return std::nullopt;
  if (!work.combines()) work.reduction = Reduction::partial;
  if (work.work == Work::combine && (sums || work.reduction == Reduction::unreduced)) work.weighted = false;
  if (work.work == Work::metadata || work.of_nccl()) {
    work.weighted = work.in_phases = false;
    work.sm_limit = 0;
  }
  // Its counts come to the host in between; without them there is nothing to wait for.
  if (work.of_nccl()) work.eager = work.work == Work::nccl;
  return work;
}

}  // namespace ferry::app
