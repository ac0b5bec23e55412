// What host backends have in common, and the backend `cpu`: lanes whose links write messages into the
// receiver's staging in shared memory. With two hops it is another class.
#include <utility>

#include "backends/cpu/backend.hpp"
#include "backends/cpu/chunk_schedule.hpp"
#include "backends/cpu/lane.hpp"
#include "backends/cpu/link/peer_link.hpp"
#include "group/channel.hpp"
#include "group/fault_points.hpp"
#include "group/rank_state.hpp"
#include "layout/exchange_layout.hpp"
#include "memory/symmetric_memory.hpp"

namespace ferry {
namespace cpu {

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
  LoadCounts sum = no_load(context_.config);
  for (const LaneOperations& operations : lanes_) operations.lane.counts.add_to(sum);
  add_up_layers(context_.config.placement, sum);
  return sum;
}

WireCounts HostBackend::wire_counts() const {
  WireCounts sum;
  for (const LaneOperations& operations : lanes_) operations.lane.counts.add_to(sum);
  return sum;
}

void HostBackend::add_waits(WaitTimes& sum) const {
  for (const LaneOperations& operations : lanes_) operations.lane.link->waits().add_to(sum);
}

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

namespace {

class SharedLink final : public PeerLink {
 public:
  // Local. `memory` is laid out by `layout` and outlives the link.
  SharedLink(const Rank& rank, const SymmetricMemory& memory, const ExchangeLayout& layout, int lane,
             const Config& config)
      : memory_(memory),
        layout_(layout),
        lane_(lane),
        rank_(rank.index()),
        ranks_(rank.size()),
        channel_(rank, memory.sections(layout.signals_of(lane)), call_summary_bytes(config), config.deadline,
                 config.count_waits) {}

  std::uint64_t begin(Operation operation, std::span<const ComparedOption> options, bool) override {
    first_chunk_ = 0;
    return channel_.begin(operation, options);
  }
  // What follows is a chunk of the call.
  void go_on() override { first_chunk_ = 1; }
  std::uint64_t call() const override { return channel_.call(); }
  std::byte* summary_to(int peer) override { return channel_.summary_to(peer); }
  const std::byte* summary_from(int peer) const override { return channel_.summary_from(peer); }
  bool packs() const override { return false; }
  void reserve(const Reservation&) override {}
  std::byte* outgoing(Staging staging, int peer) override { return staged(staging, peer, rank_); }
  const std::byte* incoming(Staging staging, int peer) const override { return staged(staging, rank_, peer); }
  std::int64_t incoming_bytes(int) const override { return 0; }
  void post(bool) override {
    if (first_chunk_ > 0) return post_chunk(0);
    for (int step = 1; step <= ranks_; ++step) channel_.post((rank_ + step) % ranks_);
  }
  void wait() override {
    for (int step = 0; step < ranks_; ++step) {
      const int peer = (rank_ + step) % ranks_;
      if (first_chunk_ == 0) channel_.wait(peer);
      if (first_chunk_ > 0 && step > 0) wait_chunk(peer, 0);
    }
  }
  void post_chunk(std::int64_t chunk) override {
    for (int step = 1; step < ranks_; ++step)
      channel_.post_chunk((rank_ + step) % ranks_, first_chunk_ + chunk);
  }
  void wait_chunk(int peer, std::int64_t chunk) override { channel_.wait_chunk(peer, first_chunk_ + chunk); }
  void refuse(Operation operation, const Error& error) noexcept override {
    channel_.refuse(operation, error);
  }
  const LaneWaits& waits() const override { return channel_.waits(); }

 private:
  // The staging of rank `at` in the buffer of the current call. Combine's rows are placed by token, whichever
  // rank writes them.
  std::byte* staged(Staging staging, int at, int source) const {
    const int parity = channel_.parity();
    const std::int64_t offset = staging == Staging::dispatch ? layout_.messages_of(lane_, parity, source)
                                                             : layout_.combine_of(lane_, parity);
    return memory_.at(at, offset);
  }

  const SymmetricMemory& memory_;
  const ExchangeLayout& layout_;
  const int lane_, rank_, ranks_;
  Channel channel_;
  std::int64_t first_chunk_ = 0;  // of the channel: chunk 0 of this link
};

CpuContext shared_context(const Rank& rank, const Config& config) {
  const ExchangeShape shape = symmetric_layout(config).shape;
  const std::int64_t budget = rank.state().chunk_budget();
  return {.rank = rank,
          .config = config,
          .plan_shape = plan_shape(config),
          .row_order_hash = row_order_hash(config),
          .messages_per_chunk = messages_per_chunk(shape, budget),
          .tokens_per_chunk = tokens_per_chunk(shape, budget),
          .kernels = kernels()};
}

class CpuBackend final : public HostBackend {
 public:
  CpuBackend(const Rank& rank, const Config& config)
      : HostBackend(shared_context(rank, config)),
        layout_(symmetric_layout(config)),
        memory_(rank, layout_.bytes()) {
    for (int lane = 0; lane < config.lanes; ++lane) {
      add_lane(std::make_unique<SharedLink>(rank, memory_, layout_, lane, config));
    }
    fault_point(FaultPoint::construct_mapped, rank.index());
  }

  Sizes sizes() const override { return cpu_sizes(context_.config, context_.me()); }

 private:
  const ExchangeLayout layout_;
  const SymmetricMemory memory_;
};

}  // namespace
}  // namespace cpu

std::unique_ptr<Backend> make_cpu_backend(const Rank& rank, const Config& config) {
  if (has_relays(config, rank.topology())) return make_relayed_cpu_backend(rank, config);
  return std::make_unique<cpu::CpuBackend>(rank, config);
}

Sizes cpu_backend_sizes(const Config& config, const Topology& topology, int rank) {
  if (has_relays(config, topology)) return relayed_cpu_backend_sizes(config, topology, rank);
  return cpu::cpu_sizes(config, rank);
}

}  // namespace ferry
