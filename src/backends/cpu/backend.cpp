// The CPU backend: lanes over one block of symmetric memory.
#include "exchange/backend.hpp"

#include <deque>
#include <mutex>

#include "backends/cpu/chunk_schedule.hpp"
#include "backends/cpu/combine.hpp"
#include "backends/cpu/dispatch.hpp"
#include "backends/cpu/scalar_operations.hpp"
#include "backends/cpu/sizes.hpp"
#include "group/fault_points.hpp"

namespace ferry {
namespace cpu {
namespace {

// A lane with its operations.
struct LaneOperations {
  LaneOperations(const Shared& shared, int index) : lane(shared, index), dispatch(lane), combine(lane) {}

  Lane lane;
  Dispatch dispatch;
  Combine combine;
};

class CpuBackend final : public Backend {
 public:
  CpuBackend(const Rank& rank, const Config& config)
      : shared_{.rank = rank,
                .config = config,
                .layout = symmetric_layout(config),
                .memory = SymmetricMemory(rank, symmetric_layout(config).bytes()),
                .plan_shape = plan_shape(config),
                .row_order_hash = row_order_hash(config),
                .chunk_messages = messages_of_chunk(shared_.layout.shape),
                .chunk_tokens = tokens_of_chunk(shared_.layout.shape),
                .kernels = kernels()} {
    for (int lane = 0; lane < config.lanes; ++lane) lanes_.emplace_back(shared_, lane);
    fault_point(FaultPoint::construct_mapped, rank.index());
  }

  Capabilities capabilities() const override { return {}; }
  Sizes sizes() const override { return cpu_sizes(shared_.config, shared_.me()); }

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
    CombineCall complete = call;
    if (call.topk_weights != nullptr && call.reduction == Reduction::partial) {
      // The sums are made where the experts are: the weights go there first.
      auto* weights = operations.lane.array<float>(operations.lane.arrays.row_weights);
      send_topk_weights(operations.lane, call, weights);
      complete.row_weights = weights;
      complete.topk_weights = nullptr;
    }
    operations.combine.send(complete, false);
    operations.combine.receive();
  }
  void combine_send(const CombineCall& call, Stream) override {
    operations(call.lane).combine.send(call, true);
  }
  void combine_receive(int lane, Stream) override { operations(lane).combine.receive(); }

  void route_values(const float* values, const Plan& plan, float* row_values, int lane, Stream) override {
    carry_route_values(operations(lane).lane, values, plan, row_values);
  }

  const StepMetadata* metadata(std::int32_t count, int lane, Stream) override {
    exchange_metadata(operations(lane).lane, count);
    return &operations(lane).lane.metadata;
  }

  void refuse(Operation operation, int lane, const Error& error, Stream) noexcept override {
    if (lane >= 0 && lane < shared_.config.lanes) operations(lane).lane.channel.refuse(operation, error);
  }

  CallDiagnostics take_diagnostics(int lane) override {
    return std::exchange(operations(lane).lane.findings, {});
  }

  LoadCounts load() const override {
    load_.assign(static_cast<std::size_t>(shared_.config.experts + shared_.ranks()), 0);
    LoadCounts counts;
    for (const LaneOperations& operations : lanes_) {
      for (std::size_t e = 0; e < operations.lane.expert_load.size(); ++e) {
        const std::int64_t routes = operations.lane.expert_load[e];
        load_[e] += routes;
        const int rank = shared_.config.placement.place(static_cast<int>(e)).rank;
        load_[operations.lane.expert_load.size() + static_cast<std::size_t>(rank)] += routes;
      }
      counts.dispatches += operations.lane.dispatches;
    }
    const auto experts = static_cast<std::size_t>(shared_.config.experts);
    counts.experts = std::span(load_).first(experts);
    counts.ranks = std::span(load_).subspan(experts);
    return counts;
  }

  WireCounts wire_counts() const override {
    WireCounts sum;
    for (const LaneOperations& operations : lanes_) {
      sum.dispatch_bytes += operations.lane.wire.dispatch_bytes;
      sum.dispatch_messages += operations.lane.wire.dispatch_messages;
      sum.combine_bytes += operations.lane.wire.combine_bytes;
      sum.combine_messages += operations.lane.wire.combine_messages;
    }
    return sum;
  }

 private:
  LaneOperations& operations(int lane) { return lanes_[static_cast<std::size_t>(lane)]; }

  const Shared shared_;
  std::deque<LaneOperations> lanes_;  // operations refer to their lane: they must not move
  mutable std::vector<std::int64_t> load_;
};

}  // namespace
}  // namespace cpu

std::unique_ptr<Backend> make_cpu_backend(const Rank& rank, const Config& config) {
  return std::make_unique<cpu::CpuBackend>(rank, config);
}

}  // namespace ferry
