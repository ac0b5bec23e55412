#include "backends/cpu/host_backend.hpp"

#include <utility>

#include "backends/cpu/lane.hpp"
#include "exchange/backend.hpp"
#include "group/channel.hpp"

namespace ferry::cpu {

OwnArrays HostBackend::own_arrays(int lane) const {
  return lanes_[static_cast<std::size_t>(lane)].lane.own_arrays();
}

DispatchResult HostBackend::dispatch(const DispatchCall& call, bool split) {
  operations(call.options.lane).dispatch.send(call, split);
  return split ? DispatchResult() : dispatch_receive(call.options);
}

DispatchResult HostBackend::dispatch_receive(const CallOptions& call) {
  return operations(call.lane).dispatch.receive();
}

void HostBackend::combine(const CombineCall& call, bool split) {
  LaneOperations& operations = this->operations(call.options.lane);
  if (call.weights_travel()) {
    auto* weights = operations.lane.array<float>(operations.lane.arrays.row_weights);
    const RouteValuesCall values{.options = call.options,
                                 .from = call.topk_weights,
                                 .plan = call.plan,
                                 .to = weights,
                                 .combine = &call};
    cpu::run(operations.lane, values);
    operations.combine.send(call.with_sent_weights(weights), split, true);
  } else {
    operations.combine.send(call, split);
  }
  if (!split) combine_receive(call.options);
}

void HostBackend::combine_receive(const CallOptions& call) {
  operations(call.lane).combine.receive();
}

SmallResult HostBackend::run(const SmallCall& call) {
  Lane& lane = operations(call_options_of(call).lane).lane;
  return std::visit([&](const auto& each) { return cpu::run(lane, each); }, call);
}

void HostBackend::refuse(Operation operation, const Error& error, const CallOptions& call) noexcept {
  if (call.lane >= 0 && call.lane < context_.config.lanes)
    operations(call.lane).lane.link->refuse(operation, error);
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

namespace ferry {

namespace cpu {

ExchangeLayout symmetric_layout(const Config& config) {
  return exchange_layout(
      exchange_shape(config, Channel::bytes(config.placement.ranks(), call_summary_bytes(config))));
}

Sizes local_sizes(const Config& config, int rank) {
  const LocalArrays arrays = local_arrays(config, rank);
  return {.results = config.lanes * arrays.parts_bytes,
          .plans = config.lanes * (arrays.bytes - arrays.parts_bytes)};
}

Sizes cpu_sizes(const Config& config, int rank) {
  const ExchangeLayout layout = symmetric_layout(config);
  Sizes sizes = local_sizes(config, rank);
  sizes.dispatch_staging = 2 * config.lanes * layout.dispatch;
  sizes.combine_staging = 2 * config.lanes * layout.combine;
  sizes.signals = config.lanes * layout.signals;
  return sizes;
}

}  // namespace cpu

Sizes cpu_backend_sizes(const Config& config, const Topology& topology, int rank) {
  if (has_relays(config, topology)) return relayed_cpu_backend_sizes(config, topology, rank);
  return cpu::cpu_sizes(config, rank);
}

}  // namespace ferry
