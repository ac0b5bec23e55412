#include "backends/cpu/host_backend.hpp"

#include <utility>

#include "backends/cpu/gather.hpp"
#include "backends/cpu/scalar_operations.hpp"

namespace ferry::cpu {

OwnArrays HostBackend::own_arrays(int lane) const {
  return lanes_[static_cast<std::size_t>(lane)].lane.own_arrays();
}

DispatchResult HostBackend::dispatch(const DispatchCall& call, Stream) {
  operations(call.lane).dispatch.send(call, false);
  return operations(call.lane).dispatch.receive();
}

void HostBackend::dispatch_send(const DispatchCall& call, Stream) {
  operations(call.lane).dispatch.send(call, true);
}

DispatchResult HostBackend::dispatch_receive(int lane, Stream) {
  return operations(lane).dispatch.receive();
}

void HostBackend::combine(const CombineCall& call, Stream) {
  LaneOperations& operations = this->operations(call.lane);
  CombineCall with_row_weights = call;
  if (call.weights_travel()) {
    auto* weights = operations.lane.array<float>(operations.lane.arrays.row_weights);
    send_topk_weights(operations.lane, call, weights);
    with_row_weights.row_weights = weights;
    with_row_weights.topk_weights = nullptr;
    with_row_weights.topk_weighted = false;
  }
  operations.combine.send(with_row_weights, false);
  operations.combine.receive();
}

void HostBackend::combine_send(const CombineCall& call, Stream) {
  operations(call.lane).combine.send(call, true);
}

void HostBackend::combine_receive(int lane, Stream) {
  operations(lane).combine.receive();
}

void HostBackend::route_values(const float* values, const Plan& plan, float* row_values, int lane, Stream) {
  send_route_values(operations(lane).lane, values, plan, row_values);
}

DispatchCounts HostBackend::dispatch_counts(const Ids& ids, std::int32_t tokens, int lane, Stream) {
  return exchange_dispatch_counts(operations(lane).lane, ids, tokens);
}

const StepMetadata* HostBackend::metadata(const MetadataCall& call, Stream) {
  Lane& lane = operations(call.lane).lane;
  exchange_metadata(lane, call.count);
  return &lane.metadata;
}

std::int64_t HostBackend::all_gather_v(const AllGatherCall& call, Stream) {
  return cpu::all_gather_v(operations(call.lane).lane, call);
}

void HostBackend::reduce_scatter_v(const ReduceScatterCall& call, Stream) {
  cpu::reduce_scatter_v(operations(call.lane).lane, call);
}

void HostBackend::refuse(Operation operation, int lane, const Error& error, Stream) noexcept {
  if (lane >= 0 && lane < context_.config.lanes) operations(lane).lane.link->refuse(operation, error);
}

CallDiagnostics HostBackend::take_diagnostics(int lane) {
  return std::exchange(operations(lane).lane.diagnostics, {});
}

LoadCounts HostBackend::load_counts() const {
  const Placement& placement = context_.config.placement;
  LoadCounts sum = no_load(placement);
  for (const LaneOperations& operations : lanes_) operations.lane.counts.add_to(placement, sum);
  return sum;
}

WireCounts HostBackend::wire_counts() const {
  WireCounts sum;
  for (const LaneOperations& operations : lanes_) operations.lane.counts.add_to(sum);
  return sum;
}

}  // namespace ferry::cpu
