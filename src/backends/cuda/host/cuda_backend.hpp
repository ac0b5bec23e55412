// The backends on device memory: implement Backend by lanes that launch kernels over symmetric memory, or
// between whose phases a carrier moves messages.
#pragma once

#include <deque>

#include "backends/cuda/host/lane.hpp"
#include "backends/cuda/protocol/failure_monitor.hpp"
#include "exchange/backend.hpp"
#include "exchange/source_operations.hpp"

namespace ferry::cuda {

class CudaBackend final : public Backend, SourceOperations {
 public:
  // Collective. `set_carriers`: unless Reach::mapped. `make_hops`: for Reach::hops.
  CudaBackend(const Rank& rank, const Config& config, Reach reach, const SetCarriers& set_carriers = {},
              const MakeHopTransport& make_hops = {});
  // Kernels of this rank may still use its memory: waits for them before it is freed.
  ~CudaBackend() override;

  Capabilities capabilities() const override {
    const bool over_engine = exchange_.over_engine();  // the host waits within a call
    return {.device_memory = true, .streams = true, .late_errors = !over_engine, .capture = !over_engine};
  }
  Sizes sizes() const override;

  DispatchResult dispatch(const DispatchCall& call, bool split) override;
  DispatchResult dispatch_receive(const CallOptions& call) override;
  void combine(const CombineCall& call, bool split) override;
  void combine_receive(const CallOptions& call) override;
  SmallResult run(const SmallCall& call) override;
  // Not in two hops.
  SourceOperations* source_operations() override { return this; }
  void refuse(Operation operation, const Error& error, const CallOptions& call) noexcept override;
  void synchronize(const CallOptions& call) override;
  void raise_device_error(int lane) override;
  CallDiagnostics take_diagnostics(int lane) override { return this->lane(lane).take_diagnostics(); }
  OwnArrays own_arrays(int lane) const override { return this->lane(lane).own_arrays(); }
  std::unique_ptr<DeviceWork> make_device_work() const override;
  LoadCounts load_counts() const override;
  WireCounts wire_counts() const override;

  // For a backend that wraps this one.
  int device() const { return exchange_.device; }
  int blocks_of_lane() const { return exchange_.blocks / exchange_.config.lanes; }
  const LaneView& view_of(int lane) { return this->lane(lane).view(); }
  void require_usable(int lane, const char* operation, const CallPointers& pointers) {
    this->lane(lane).require_usable(operation, pointers);
  }

 private:
  Lane& lane(int index) { return lanes_[static_cast<std::size_t>(index)]; }
  const Lane& lane(int index) const { return lanes_[static_cast<std::size_t>(index)]; }
  // Throws the group's failure, including one that the device has just reported.
  void throw_if_failed(Operation operation);
  // The first step of a call: the same.
  void begin(Operation operation);
  // The last step of dispatch_counts.
  DispatchCounts await_counts(Lane& lane, Stream stream);
  void keep_ids(const KeepIdsCall& call) override;
  void describe_rows(const DescribeRowsCall& call) override;
  void plan_return(const PlanReturnCall& call) override;
  void check_returned(const CheckReturnedCall& call) override;
  std::int64_t scratch_bytes() const override;

  const ExchangeState exchange_;
  FailureMonitor monitor_;
  std::deque<Lane> lanes_;  // deque: callers hold pointers into lanes, which must not move
};

}  // namespace ferry::cuda
