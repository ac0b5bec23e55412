// The CPU backend: lanes that share one region of symmetric memory. With two hops it is another class.
#include "backends/cpu/chunk_schedule.hpp"
#include "backends/cpu/host_backend.hpp"
#include "backends/cpu/link/shared_link.hpp"
#include "backends/cpu/sizes.hpp"
#include "group/fault_points.hpp"
#include "group/rank_state.hpp"

namespace ferry {
namespace cpu {
namespace {

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
