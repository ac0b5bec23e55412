#include "backends/cuda/host/lane_streams.hpp"

#include <algorithm>

namespace ferry::cuda {

StreamRegistry& StreamRegistry::of_process() {
  static StreamRegistry registry;
  return registry;
}

int StreamRegistry::record(const void* exchange, int lane, int rank, std::uint64_t number,
                           const StreamIdentity& stream) {
  const std::lock_guard lock(mutex_);
  std::vector<Use>& uses = uses_[{exchange, lane}];
  for (const Use& use : uses) {
    if (use.rank != rank && use.number == number && in_order(use.stream, stream)) return use.rank;
  }
  const auto mine = std::find_if(uses.begin(), uses.end(), [=](const Use& use) { return use.rank == rank; });
  if (mine == uses.end()) {
    uses.push_back({rank, number, stream});
  } else {
    *mine = {rank, number, stream};
  }
  return -1;
}

void StreamRegistry::forget(const void* exchange, int rank) {
  const std::lock_guard lock(mutex_);
  for (auto at = uses_.begin(); at != uses_.end();) {
    if (at->first.first == exchange)
      std::erase_if(at->second, [=](const Use& use) { return use.rank == rank; });
    at = at->second.empty() ? uses_.erase(at) : std::next(at);
  }
}

}  // namespace ferry::cuda
