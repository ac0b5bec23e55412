// The backend of experts in slices on device memory, around a cuda backend.
#include "backends/sliced/backend.hpp"

#include "backends/cuda/host/call_pointers.hpp"
#include "backends/cuda/host/cuda_backend.hpp"
#include "backends/cuda/memory/device_memory.hpp"
#include "backends/cuda/runtime/stream.hpp"
#include "backends/cuda/sliced/steps.hpp"

namespace ferry {
namespace cuda {
namespace {

class DeviceLane final : public sliced::OwnedLane {
 public:
  DeviceLane(const sliced::SlicedContext& context, int index, CudaBackend& cuda)
      : cuda_(cuda),
        memory_(sliced::sliced_arrays(context.config, context.me()).bytes),
        totals_(sizeof(HostTotals)),
        steps_(make_slice_steps(cuda.view_of(index), cuda.blocks_of_lane(), context.late_errors)),
        lane_(context, index, *steps_, memory_.data(), reinterpret_cast<HostTotals*>(totals_.data())) {
    const std::vector<int>& experts = context.config.placement.experts_of(context.me());
    copy_blocking(lane_.group_expert(), experts.data(),
                  static_cast<std::int64_t>(experts.size() * sizeof(int)));
  }

  sliced::Lane& lane() override { return lane_; }
  void check_pointers(const DispatchCall& call) const override {
    cuda_.require_usable(call.options.lane, to_string(Operation::dispatch), pointers_of(call));
  }
  void check_pointers(const CombineCall& call) const override {
    cuda_.require_usable(call.options.lane, to_string(Operation::combine), pointers_of(call));
  }
  std::int32_t first_token() const override {
    std::int32_t first = 0;
    read(&first, lane_.first_token(), sizeof first);
    return first;
  }
  void add_sent(WireCounts& sum) const override {
    sliced::SliceTotals mine;
    read(&mine, lane_.all_calls(), sizeof mine);
    sum.dispatch_bytes += mine.dispatch_bytes;
    sum.dispatch_messages += mine.dispatch_messages;
    sum.combine_bytes += mine.combine_bytes;
    sum.combine_messages += mine.combine_messages;
  }

 private:
  void read(void* to, const void* from, std::int64_t bytes) const {
    const ScopedDevice device(cuda_.device());
    copy_blocking(to, from, bytes);
  }

  CudaBackend& cuda_;
  DeviceMemory memory_;
  PinnedMemory totals_;
  std::unique_ptr<sliced::SliceSteps> steps_;
  sliced::Lane lane_;
};

}  // namespace
}  // namespace cuda

std::unique_ptr<Backend> make_device_sliced_backend(const Rank& rank, const Config& config,
                                                    std::unique_ptr<Backend> inner) {
  auto backend = std::make_unique<sliced::SlicedBackend>(rank, config, std::move(inner));
  auto& cuda = dynamic_cast<cuda::CudaBackend&>(backend->inner());
  for (int lane = 0; lane < config.lanes; ++lane)
    backend->add(std::make_unique<cuda::DeviceLane>(backend->context(), lane, cuda));
  return backend;
}

}  // namespace ferry
