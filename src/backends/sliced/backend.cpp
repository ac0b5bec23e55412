// The backend of experts in slices on host memory.
#include "backends/sliced/backend.hpp"

#include <algorithm>

#include "backends/sliced/host_steps.hpp"
#include "memory/local_memory.hpp"

namespace ferry {
namespace sliced {
namespace {

class HostLane final : public OwnedLane {
 public:
  HostLane(const SlicedContext& context, int index)
      : memory_(sliced_arrays(context.config, context.me()).bytes),
        steps_(context.rank),
        lane_(context, index, steps_, memory_.data(), &totals_) {
    std::ranges::copy(context.config.placement.experts_of(context.me()), lane_.group_expert());
  }

  Lane& lane() override { return lane_; }
  std::int32_t first_token() const override { return *lane_.first_token(); }
  void add_sent(WireCounts& sum) const override { steps_.add_sent(sum); }

 private:
  LocalMemory memory_;
  HostTotals totals_;
  HostSteps steps_;
  Lane lane_;
};

}  // namespace
}  // namespace sliced

std::unique_ptr<Backend> make_sliced_backend(const Rank& rank, const Config& config,
                                             std::unique_ptr<Backend> inner) {
  auto backend = std::make_unique<sliced::SlicedBackend>(rank, config, std::move(inner));
  for (int lane = 0; lane < config.lanes; ++lane)
    backend->add(std::make_unique<sliced::HostLane>(backend->context(), lane));
  return backend;
}

Sizes sliced_backend_sizes(const Config& config, int rank, const Sizes& inner) {
  const sliced::SlicedArrays arrays = sliced::sliced_arrays(config, rank);
  Sizes sizes = inner;
  sizes.results += config.lanes * arrays.result_bytes;
  sizes.messages += config.lanes * (arrays.bytes - arrays.result_bytes);
  return sizes;
}

}  // namespace ferry
