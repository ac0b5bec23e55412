// The backend of experts in slices on device memory: routes a slice of the tokens with a cuda backend, and
// gathers within the sub-groups.
#include <deque>

#include "backends/cuda/host/call_pointers.hpp"
#include "backends/cuda/host/cuda_backend.hpp"
#include "backends/cuda/memory/device_memory.hpp"
#include "backends/cuda/runtime/stream.hpp"
#include "backends/cuda/sliced/lane.hpp"
#include "backends/cuda/sliced/slices.hpp"
#include "base/errors.hpp"
#include "exchange/device_work.hpp"
#include "exchange/sliced_backend.hpp"

namespace ferry {
namespace cuda {
namespace {

// A lane with its memory.
struct OwnedLane {
  OwnedLane(const SlicedContext& context, int index, const LaneView& view)
      : memory(sliced_arrays(context.config, context.me()).bytes),
        totals(sizeof(HostTotals)),
        lane(context, index, view, memory.data(), reinterpret_cast<HostTotals*>(totals.data())) {
    const std::vector<int>& experts = context.config.placement.experts_of(context.me());
    copy_blocking(const_cast<std::int32_t*>(lane.group_expert()), experts.data(),
                  static_cast<std::int64_t>(experts.size() * sizeof(int)));
  }

  DeviceMemory memory;
  PinnedMemory totals;
  SlicedLane lane;
};

class SlicedBackend final : public SlicedBackendBase {
 public:
  SlicedBackend(const Rank& rank, const Config& config, std::unique_ptr<Backend> routing)
      : SlicedBackendBase(std::move(routing)),
        cuda_(dynamic_cast<CudaBackend&>(inner())),
        context_{.rank = rank,
                 .config = config,
                 .inner = &inner(),
                 .blocks = cuda_.blocks_of_lane(),
                 .late_errors = inner().capabilities().late_errors} {
    for (int lane = 0; lane < config.lanes; ++lane) lanes_.emplace_back(context_, lane, cuda_.view_of(lane));
  }

  Capabilities capabilities() const override { return inner().capabilities(); }
  Sizes sizes() const override {
    return device_sliced_sizes(context_.config, context_.me(), inner().sizes());
  }

  DispatchResult dispatch(const DispatchCall& call, Stream stream) override {
    check_pointers(Operation::dispatch, call, stream);
    return lane(call.lane).dispatch(call, stream);
  }
  void combine(const CombineCall& call, Stream stream) override {
    check_pointers(Operation::combine, call, stream);
    lane(call.lane).combine(call, stream);
  }

  OwnArrays own_arrays(int lane) const override {
    return lanes_[static_cast<std::size_t>(lane)].lane.own_arrays();
  }
  std::unique_ptr<DeviceWork> make_device_work() const override { return inner().make_device_work(); }
  void refuse(Operation operation, int lane, const Error& error, Stream stream) noexcept override {
    const bool in_steps = operation == Operation::dispatch || operation == Operation::combine;
    if (in_steps && lane >= 0 && lane < context_.config.lanes) {
      this->lane(lane).refuse(operation, error, stream);
    } else {
      inner().refuse(operation, lane, error, stream);
    }
  }
  void synchronize(int lane, Stream stream) override { inner().synchronize(lane, stream); }
  void raise_device_error(int lane) override { inner().raise_device_error(lane); }
  CallDiagnostics take_diagnostics(int index) override {
    CallDiagnostics found = inner().take_diagnostics(index);
    if (found.bad_id.count == 0) return found;
    const ScopedDevice device(cuda_.device());
    std::int32_t first = 0;
    copy_blocking(&first, lane(index).first_token(), sizeof first);
    unsliced_id(context_.config, first, found.bad_id);
    return found;
  }
  LoadCounts load_counts() const override {
    return load_of_slices(inner().load_counts(), context_.config.placement);
  }
  WireCounts wire_counts() const override {
    const ScopedDevice device(cuda_.device());
    WireCounts sum = inner().wire_counts();
    for (const OwnedLane& owned : lanes_) {
      SliceTotals mine;
      copy_blocking(&mine, owned.lane.all_calls(), sizeof mine);
      sum.dispatch_bytes += mine.wire.dispatch_bytes;
      sum.dispatch_messages += mine.wire.dispatch_messages;
      sum.combine_bytes += mine.wire.combine_bytes;
      sum.combine_messages += mine.wire.combine_messages;
    }
    return sum;
  }

 private:
  SlicedLane& lane(int index) { return lanes_[static_cast<std::size_t>(index)].lane; }

  // Checks the caller's pointers before the first kernel reads them.
  template <class Arguments>
  void check_pointers(Operation operation, const Arguments& call, Stream stream) {
    or_refuse([&](const Error& error) { refuse(operation, call.lane, error, stream); },
              [&] { cuda_.require_usable(call.lane, to_string(operation), pointers_of(call)); });
  }

  CudaBackend& cuda_;
  const SlicedContext context_;
  std::deque<OwnedLane> lanes_;  // a deque: lanes cannot be moved
};

}  // namespace
}  // namespace cuda

std::unique_ptr<Backend> make_device_sliced_backend(const Rank& rank, const Config& config,
                                                    std::unique_ptr<Backend> inner) {
  return std::make_unique<cuda::SlicedBackend>(rank, config, std::move(inner));
}

Sizes device_sliced_sizes(const Config& config, int rank, const Sizes& inner) {
  const cuda::SlicedArrays arrays = cuda::sliced_arrays(config, rank);
  Sizes sizes = inner;
  sizes.results += config.lanes * arrays.result_bytes;
  sizes.messages += config.lanes * (arrays.bytes - arrays.result_bytes);
  return sizes;
}

}  // namespace ferry
