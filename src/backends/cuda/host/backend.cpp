// The CUDA backend: lanes over one block of symmetric device memory.
#include "exchange/backend.hpp"

#include <atomic>
#include <deque>

#include "backends/cuda/host/current_device.hpp"
#include "backends/cuda/host/error.hpp"
#include "backends/cuda/host/lane.hpp"
#include "backends/cuda/protocol/watch.hpp"
#include "exchange/configuration.hpp"
#include "group/fault_points.hpp"
#include "group/rank_state.hpp"

namespace ferry {
namespace cuda {
namespace {

class CudaBackend final : public Backend {
 public:
  CudaBackend(const Rank& rank, const Config& config)
      : shared_(rank, config), watch_(rank, shared_.report(), config.deadline) {
    for (int lane = 0; lane < config.lanes; ++lane) lanes_.emplace_back(shared_, lane);
    fault_point(FaultPoint::construct_mapped, rank.index());
    // Tables and signals of all ranks are there before the first kernel writes to any of them.
    rank.barrier();
  }
  // Kernels of this rank may still run: its memory goes when they have ended.
  ~CudaBackend() override {
    const OnDevice device(shared_.device);
    cudaDeviceSynchronize();
  }

  Capabilities capabilities() const override { return {.device_memory = true, .streams = true}; }
  Sizes sizes() const override { return cuda_backend_sizes(shared_.config, shared_.me()); }

  DispatchResult dispatch(const DispatchCall& call, Stream stream) override {
    return dispatch(call, Phase::fused, stream);
  }
  void dispatch_send(const DispatchCall& call, Stream stream) override {
    dispatch(call, Phase::send, stream);
  }
  DispatchResult dispatch_receive(int lane, Stream stream) override {
    require_whole(Operation::dispatch);
    return this->lane(lane).dispatch_receive(stream);
  }

  void combine(const CombineCall& call, Stream stream) override { combine(call, Phase::fused, stream); }
  void combine_send(const CombineCall& call, Stream stream) override { combine(call, Phase::send, stream); }
  void combine_receive(int lane, Stream stream) override {
    require_whole(Operation::combine);
    this->lane(lane).combine_receive(stream);
  }

  void route_values(const float* values, const Plan& plan, float* row_values, int lane,
                    Stream stream) override {
    require_whole(Operation::route_values);
    fault_point(FaultPoint::route_values_begin, shared_.me());
    this->lane(lane).route_values(values, plan, row_values, stream);
  }
  const StepMetadata* metadata(std::int32_t count, int lane, Stream stream) override {
    require_whole(Operation::metadata);
    fault_point(FaultPoint::metadata_begin, shared_.me());
    return this->lane(lane).metadata(count, nullptr, stream);
  }
  const StepMetadata* metadata_from_device(const std::int32_t* count, int lane, Stream stream) override {
    require_whole(Operation::metadata);
    fault_point(FaultPoint::metadata_begin, shared_.me());
    return this->lane(lane).metadata(0, count, stream);
  }

  void refuse(Operation operation, int lane, const Error& error, Stream stream) noexcept override {
    try {
      if (lane >= 0 && lane < shared_.config.lanes) this->lane(lane).refuse(operation, error, stream);
    } catch (...) {
      return;  // the device does nothing any more: the next call says why
    }
  }

  void synchronize(int lane, Stream stream) override {
    check(cudaStreamSynchronize(handle_of(stream)), "wait for a stream");
    raise_device_error(lane);
  }
  void raise_device_error(int lane) override {
    require_whole(Operation::none);
    this->lane(lane).raise_device_error();
  }

  CallDiagnostics take_diagnostics(int lane) override { return this->lane(lane).take_diagnostics(); }

  LoadCounts load() const override {
    const auto experts = static_cast<std::size_t>(shared_.config.experts);
    LoadCounts counts;
    load_.assign(experts, 0);
    for (const Lane& lane : lanes_) lane.add_load(load_, counts.dispatches);
    load_.resize(experts + static_cast<std::size_t>(shared_.rank.size()), 0);
    for (std::size_t e = 0; e < experts; ++e) {
      const int rank = shared_.config.placement.place(static_cast<int>(e)).rank;
      load_[experts + static_cast<std::size_t>(rank)] += load_[e];
    }
    counts.experts = std::span(load_).first(experts);
    counts.ranks = std::span(load_).subspan(experts);
    return counts;
  }

  WireCounts wire_counts() const override {
    WireCounts sum;
    for (const Lane& lane : lanes_) lane.add_wire(sum);
    return sum;
  }

 private:
  Lane& lane(int index) { return lanes_[static_cast<std::size_t>(index)]; }

  // Throws the group's failure, also one that the device has just reported.
  void require_whole(Operation operation) {
    RankState& state = shared_.rank.state();
    HostReport* report = shared_.report();
    // Acquire: the kernel stores the record before the mark.
    if (std::atomic_ref(report->timed_out).load(std::memory_order_acquire) != 0 &&
        !state.control().failed()) {
      state.time_out(report->timeout, shared_.config.deadline);
    }
    if (!state.control().failed()) return;
    WaitRecord asking = report->timeout;
    if (report->timed_out == 0) asking = {operation, 0, shared_.me(), -1, 0, 0};
    state.control().throw_failure(asking);
  }

  // What only this backend can find wrong: the peers' call ends with it too.
  template <class Call>
  auto or_refuse(Operation operation, int lane, Stream stream, Call call) {
    try {
      return call();
    } catch (const UsageError& error) {
      refuse(operation, lane, error, stream);
      throw;
    }
  }

  DispatchResult dispatch(const DispatchCall& call, Phase phase, Stream stream) {
    require_whole(Operation::dispatch);
    fault_point(FaultPoint::dispatch_begin, shared_.me());
    return or_refuse(Operation::dispatch, call.lane, stream,
                     [&] { return lane(call.lane).dispatch(call, phase, stream); });
  }

  void combine(const CombineCall& call, Phase phase, Stream stream) {
    require_whole(Operation::combine);
    fault_point(FaultPoint::combine_begin, shared_.me());
    or_refuse(Operation::combine, call.lane, stream, [&] { lane(call.lane).combine(call, phase, stream); });
  }

  const Shared shared_;
  Watch watch_;
  std::deque<Lane> lanes_;  // views into them are handed out: they must not move
  mutable std::vector<std::int64_t> load_;
};

}  // namespace
}  // namespace cuda

std::unique_ptr<Backend> make_cuda_backend(const Rank& rank, const Config& config) {
  cuda::check_limits(config);
  return std::make_unique<cuda::CudaBackend>(rank, config);
}

}  // namespace ferry
