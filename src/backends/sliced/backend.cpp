// The backend of experts in slices (Placement::ep_tp): another backend of host memory, which routes a slice
// of the tokens, and gathers within the sub-groups.
#include <deque>

#include "backends/sliced/lane.hpp"
#include "exchange/sliced_backend.hpp"

namespace ferry {
namespace sliced {
namespace {

class SlicedBackend final : public SlicedBackendBase {
 public:
  SlicedBackend(const Rank& rank, const Config& config, std::unique_ptr<Backend> routing)
      : SlicedBackendBase(std::move(routing)), context_{.rank = rank, .config = config, .inner = &inner()} {
    for (int lane = 0; lane < config.lanes; ++lane) lanes_.emplace_back(context_, lane);
  }

  Capabilities capabilities() const override { return {}; }
  Sizes sizes() const override {
    return sliced_backend_sizes(context_.config, context_.me(), inner().sizes());
  }

  DispatchResult dispatch(const DispatchCall& call, Stream stream) override {
    return lane(call.lane).dispatch(call, stream);
  }
  void combine(const CombineCall& call, Stream stream) override { lane(call.lane).combine(call, stream); }

  OwnArrays own_arrays(int lane) const override {
    return lanes_[static_cast<std::size_t>(lane)].own_arrays();
  }
  void refuse(Operation operation, int lane, const Error& error, Stream stream) noexcept override {
    inner().refuse(operation, lane, error, stream);
  }
  CallDiagnostics take_diagnostics(int index) override { return lane(index).take_diagnostics(); }

  LoadCounts load_counts() const override {
    return load_of_slices(inner().load_counts(), context_.config.placement);
  }
  WireCounts wire_counts() const override {
    WireCounts sum = inner().wire_counts();
    for (const Lane& lane : lanes_) lane.sent.add_to(sum);
    return sum;
  }

 private:
  Lane& lane(int index) { return lanes_[static_cast<std::size_t>(index)]; }

  const SlicedContext context_;
  std::deque<Lane> lanes_;  // a deque: results refer to their lane, so elements must not move
};

}  // namespace
}  // namespace sliced

std::unique_ptr<Backend> make_sliced_backend(const Rank& rank, const Config& config,
                                             std::unique_ptr<Backend> inner) {
  return std::make_unique<sliced::SlicedBackend>(rank, config, std::move(inner));
}

Sizes sliced_backend_sizes(const Config& config, int rank, const Sizes& inner) {
  const sliced::LocalArrays arrays = sliced::local_arrays(config, rank);
  Sizes sizes = inner;
  sizes.results += config.lanes * arrays.result_bytes;
  sizes.messages += config.lanes * (arrays.bytes - arrays.result_bytes);
  return sizes;
}

}  // namespace ferry
