// The backends whose ranks compute on the host: lanes with the operations of this folder, each with a link to
// its peers. `cpu` gives them shared memory, `collective` an engine.
#pragma once

#include <deque>
#include <memory>

#include "backends/cpu/combine.hpp"
#include "backends/cpu/dispatch.hpp"
#include "exchange/backend.hpp"
#include "exchange/configuration.hpp"

namespace ferry::cpu {

class HostBackend : public Backend {
 public:
  Capabilities capabilities() const override { return {}; }
  DispatchResult dispatch(const DispatchCall& call, bool split) override;
  DispatchResult dispatch_receive(const CallOptions& call) override;
  void combine(const CombineCall& call, bool split) override;
  void combine_receive(const CallOptions& call) override;
  SmallResult run(const SmallCall& call) override;
  OwnArrays own_arrays(int lane) const override;
  std::uint64_t last_call(int lane) const override {
    return lanes_[static_cast<std::size_t>(lane)].lane.link->call();
  }
  void refuse(Operation operation, const Error& error, const CallOptions& call) noexcept override;
  CallDiagnostics take_diagnostics(int lane) override;
  LoadCounts load_counts() const override;
  WireCounts wire_counts() const override;
  void add_waits(WaitTimes& sum) const override;

 protected:
  explicit HostBackend(CpuContext context) : context_(std::move(context)) {}

  // Call it once for each lane, in order, from the constructor.
  void add_lane(std::unique_ptr<PeerLink> link) { lanes_.emplace_back(context_, std::move(link)); }

  const CpuContext context_;

 private:
  // A lane and its operations.
  struct LaneOperations {
    LaneOperations(const CpuContext& context, std::unique_ptr<PeerLink> link)
        : lane(context, std::move(link)), dispatch(lane), combine(lane) {}
    // A send phase may have left a thread that forwards messages by these operations.
    ~LaneOperations() { lane.link->end(); }
    LaneOperations(const LaneOperations&) = delete;
    LaneOperations& operator=(const LaneOperations&) = delete;

    Lane lane;
    Dispatch dispatch;
    Combine combine;
  };

  LaneOperations& operations(int lane) { return lanes_[static_cast<std::size_t>(lane)]; }

  std::deque<LaneOperations> lanes_;  // a deque: operations refer to their lane, so elements must not move
};

// How much memory the CPU backend takes, computed from the layout it uses.
ExchangeLayout symmetric_layout(const Config& config);
Sizes cpu_sizes(const Config& config, int rank);
// Sizes of memory that only this rank uses: results and plans.
Sizes local_sizes(const Config& config, int rank);

}  // namespace ferry::cpu
