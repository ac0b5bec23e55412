// The CPU backend: lanes that share one region of symmetric memory.
#include "exchange/backend.hpp"

#include <deque>
#include <mutex>

#include "backends/cpu/chunk_schedule.hpp"
#include "backends/cpu/combine.hpp"
#include "backends/cpu/dispatch.hpp"
#include "backends/cpu/scalar_operations.hpp"
#include "backends/cpu/sizes.hpp"
#include "group/fault_points.hpp"
#include "group/rank_state.hpp"

namespace ferry {
namespace cpu {
namespace {

// A lane and its operations.
struct LaneOperations {
  LaneOperations(const CpuContext& context, int index)
      : lane(context, index), dispatch(lane), combine(lane) {}

  Lane lane;
  Dispatch dispatch;
  Combine combine;
};

class CpuBackend final : public Backend {
 public:
  CpuBackend(const Rank& rank, const Config& config)
      : context_{.rank = rank,
                 .config = config,
                 .layout = symmetric_layout(config),
                 .memory = SymmetricMemory(rank, symmetric_layout(config).bytes()),
                 .plan_shape = plan_shape(config),
                 .row_order_hash = row_order_hash(config),
                 .messages_per_chunk = messages_per_chunk(context_.layout.shape, rank.state().chunk_budget()),
                 .tokens_per_chunk = tokens_per_chunk(context_.layout.shape, rank.state().chunk_budget()),
                 .kernels = kernels()} {
    for (int lane = 0; lane < config.lanes; ++lane) lanes_.emplace_back(context_, lane);
    fault_point(FaultPoint::construct_mapped, rank.index());
  }

  Capabilities capabilities() const override { return {}; }
  Sizes sizes() const override { return cpu_sizes(context_.config, context_.me()); }

  DispatchResult dispatch(const DispatchCall& call, Stream) override {
    operations(call.lane).dispatch.send(call, false);
    return operations(call.lane).dispatch.receive();
  }
  void dispatch_send(const DispatchCall& call, Stream) override {
    operations(call.lane).dispatch.send(call, true);
  }
  DispatchResult dispatch_receive(int lane, Stream) override { return operations(lane).dispatch.receive(); }

  void combine(const CombineCall& call, Stream) override {
    LaneOperations& operations = this->operations(call.lane);
    CombineCall with_row_weights = call;
    if (call.topk_weights != nullptr && call.reduction == Reduction::partial) {
      // Partial sums are computed on the ranks of the experts, so the weights are sent there first.
      auto* weights = operations.lane.array<float>(operations.lane.arrays.row_weights);
      send_topk_weights(operations.lane, call, weights);
      with_row_weights.row_weights = weights;
      with_row_weights.topk_weights = nullptr;
    }
    operations.combine.send(with_row_weights, false);
    operations.combine.receive();
  }
  void combine_send(const CombineCall& call, Stream) override {
    operations(call.lane).combine.send(call, true);
  }
  void combine_receive(int lane, Stream) override { operations(lane).combine.receive(); }

  void route_values(const float* values, const Plan& plan, float* row_values, int lane, Stream) override {
    send_route_values(operations(lane).lane, values, plan, row_values);
  }

  DispatchCounts dispatch_counts(const Ids& ids, std::int32_t tokens, int lane, Stream) override {
    return exchange_dispatch_counts(operations(lane).lane, ids, tokens);
  }
  const StepMetadata* metadata(std::int32_t count, int lane, Stream) override {
    exchange_metadata(operations(lane).lane, count);
    return &operations(lane).lane.metadata;
  }

  void refuse(Operation operation, int lane, const Error& error, Stream) noexcept override {
    if (lane >= 0 && lane < context_.config.lanes) operations(lane).lane.channel.refuse(operation, error);
  }

  CallDiagnostics take_diagnostics(int lane) override {
    return std::exchange(operations(lane).lane.diagnostics, {});
  }

  LoadCounts load_counts() const override {
    const Placement& placement = context_.config.placement;
    LoadCounts sum = no_load(placement);
    for (const LaneOperations& operations : lanes_) operations.lane.counts.add_to(placement, sum);
    return sum;
  }

  WireCounts wire_counts() const override {
    WireCounts sum;
    for (const LaneOperations& operations : lanes_) operations.lane.counts.add_to(sum);
    return sum;
  }

 private:
  LaneOperations& operations(int lane) { return lanes_[static_cast<std::size_t>(lane)]; }

  const CpuContext context_;
  std::deque<LaneOperations> lanes_;  // a deque: operations refer to their lane, so elements must not move
};

}  // namespace
}  // namespace cpu

std::unique_ptr<Backend> make_cpu_backend(const Rank& rank, const Config& config) {
  return std::make_unique<cpu::CpuBackend>(rank, config);
}

}  // namespace ferry
