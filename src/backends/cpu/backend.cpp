// The backend `cpu`: lanes whose links write messages into the receiver's staging in shared memory. With two
// hops it is another class.
#include "backends/cpu/chunk_schedule.hpp"
#include "backends/cpu/host_backend.hpp"
#include "backends/cpu/link/peer_link.hpp"
#include "group/fault_points.hpp"
#include "group/rank_state.hpp"
#include "layout/exchange_layout.hpp"
#include "memory/symmetric_memory.hpp"

namespace ferry {
namespace cpu {
namespace {

class SharedLink final : public PeerLink {
 public:
  // Local. `memory` is laid out by `layout` and outlives the link.
  SharedLink(const Rank& rank, const SymmetricMemory& memory, const ExchangeLayout& layout, int lane,
             std::int64_t summary_bytes, double deadline)
      : memory_(memory),
        layout_(layout),
        lane_(lane),
        rank_(rank.index()),
        ranks_(rank.size()),
        channel_(rank, memory.sections(layout.signals_of(lane)), summary_bytes, deadline) {}

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
      add_lane(std::make_unique<SharedLink>(rank, memory_, layout_, lane, call_summary_bytes(config),
                                            config.deadline));
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

}  // namespace ferry
