#include "exchange/replicas.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "base/text.hpp"
#include "exchange/lane_counts.hpp"
#include "ferry/error.hpp"
#include "plan/shapes.hpp"
#include "plan/slot.hpp"

namespace ferry {
namespace {

// Between the ids of a caller and those inside. An id that is no expert's must be none inside either.
struct ReplicaIds {
  const Placement& placement;
  int source;  // 0 with replicated input

  std::int64_t inside(std::int64_t id, int token, int slot) const {
    const std::int64_t more = further();
    if (classify_id(id, placement.experts()) == IdKind::expert)
      return placement.replica(static_cast<int>(id), {.token = token, .source = source, .slot = slot});
    return id < 0 ? id : std::min(id, std::numeric_limits<std::int64_t>::max() - more) + more;
  }
  // The id that was passed for a bad one inside; one near 2^63 has become smaller.
  std::int64_t bad_outside(std::int64_t id) const { return id < 0 ? id : id - further(); }
  std::int64_t further() const { return placement.total_replicas() - placement.experts(); }
};

// A lane's arrays, which the next dispatch overwrites.
struct ReplicaLane {
  std::vector<std::int64_t> ids;           // [T, K]
  std::vector<float> input_scales;         // [P + S]
  std::vector<std::int32_t> group_expert;  // [G]
};

std::int64_t id_bytes(const Config& config) {
  return std::int64_t{config.max_tokens} * config.top_k * static_cast<std::int64_t>(sizeof(std::int64_t));
}

std::int64_t scale_count(const Config& config) {
  return std::int64_t{config.placement.total_replicas()} + config.shared_experts;
}

class ReplicaBackend final : public Backend {
 public:
  ReplicaBackend(const Rank& rank, const Config& config, std::unique_ptr<Backend> inner)
      : config_(config),
        me_(rank.index()),
        inner_(std::move(inner)),
        expert_of_(static_cast<std::size_t>(config.placement.total_replicas())),
        lanes_(static_cast<std::size_t>(config.lanes)) {
    std::size_t replica = 0;
    for (int expert = 0; expert < config.experts; ++expert)
      for (std::size_t i = 0; i < config.placement.replicas_of(expert).size(); ++i)
        expert_of_[replica++] = expert;
    for (ReplicaLane& lane : lanes_) {
      lane.ids.resize(static_cast<std::size_t>(config.max_tokens) * static_cast<std::size_t>(config.top_k));
      lane.input_scales.resize(static_cast<std::size_t>(scale_count(config)));
      lane.group_expert = group_experts(config, me_);
    }
  }

  Capabilities capabilities() const override { return inner_->capabilities(); }
  Sizes sizes() const override { return replica_backend_sizes(config_, me_, inner_->sizes()); }

  DispatchResult dispatch(const DispatchCall& given, bool split) override {
    ReplicaLane& lane = lane_of(given.options);
    DispatchCall call = given;
    if (given.plan.empty()) call.ids = inside(lane, given.ids, given.tokens.count);
    if (!given.input_scales.empty()) call.input_scales = inside(lane, given.input_scales);
    return outside(inner_->dispatch(call, split), given.options);
  }
  DispatchResult dispatch_receive(const CallOptions& call) override {
    return outside(inner_->dispatch_receive(call), call);
  }
  void combine(const CombineCall& call, bool split) override { inner_->combine(call, split); }
  void combine_receive(const CallOptions& call) override { inner_->combine_receive(call); }

  SmallResult run(const SmallCall& given) override {
    const auto* const counts = std::get_if<DispatchCountsCall>(&given);
    if (counts == nullptr) return inner_->run(given);
    DispatchCountsCall call = *counts;
    call.ids = inside(lane_of(call.options), call.ids, call.tokens);
    return inner_->run(call);
  }

  OwnArrays own_arrays(int lane) const override { return inner_->own_arrays(lane); }
  void refuse(Operation operation, const Error& error, const CallOptions& call) noexcept override {
    inner_->refuse(operation, error, call);
  }

  CallDiagnostics take_diagnostics(int lane) override {
    CallDiagnostics found = inner_->take_diagnostics(lane);
    if (found.bad_id.count > 0) found.bad_id.id = ids().bad_outside(found.bad_id.id);
    int& expert = found.bad_scale.expert;
    if (expert >= 0) {
      const int replicas = config_.placement.total_replicas();
      expert = expert < replicas ? expert_of_[static_cast<std::size_t>(expert)]
                                 : config_.experts + expert - replicas;
    }
    return found;
  }

  LoadCounts load_counts() const override {
    const LoadCounts inside = inner_->load_counts();
    LoadCounts sum = no_load(config_.placement);
    sum.dispatches = inside.dispatches;
    sum.ranks = inside.ranks;
    for (std::size_t replica = 0; replica < inside.experts.size(); ++replica)
      sum.experts[static_cast<std::size_t>(expert_of_[replica])] += inside.experts[replica];
    return sum;
  }
  WireCounts wire_counts() const override { return inner_->wire_counts(); }

 private:
  ReplicaIds ids() const { return {config_.placement, config_.input == Input::replicated ? 0 : me_}; }
  ReplicaLane& lane_of(const CallOptions& call) { return lanes_[static_cast<std::size_t>(call.lane)]; }

  // The replicas that the routes of `tokens` tokens take.
  Ids inside(ReplicaLane& lane, const Ids& given, std::int64_t tokens) const {
    const auto fill = [&](const auto* from) {
      std::int64_t* to = lane.ids.data();
      for (std::int64_t token = 0; token < tokens; ++token) {
        for (int slot = 0; slot < config_.top_k; ++slot)
          *to++ = ids().inside(*from++, static_cast<int>(token), slot);
      }
    };
    if (given.type == IdType::int64) {
      fill(static_cast<const std::int64_t*>(given.data));
    } else {
      fill(static_cast<const std::int32_t*>(given.data));
    }
    return Ids(lane.ids.data());
  }

  // Every replica has the scale of its expert.
  std::span<const float> inside(ReplicaLane& lane, std::span<const float> scales) const {
    for (std::size_t replica = 0; replica < expert_of_.size(); ++replica)
      lane.input_scales[replica] = scales[static_cast<std::size_t>(expert_of_[replica])];
    std::copy(scales.begin() + config_.experts, scales.end(),
              lane.input_scales.begin() + static_cast<std::ptrdiff_t>(expert_of_.size()));
    return lane.input_scales;
  }

  DispatchResult outside(DispatchResult result, const CallOptions& call) {
    result.group_expert = lane_of(call).group_expert.data();
    return result;
  }

  const Config config_;
  const int me_;
  const std::unique_ptr<Backend> inner_;
  std::vector<std::int32_t> expert_of_;  // [P]
  std::vector<ReplicaLane> lanes_;
};

}  // namespace

Config replica_config(const Config& config) {
  const Placement& placement = config.placement;
  Config inside = config;
  inside.experts = placement.total_replicas();
  inside.placement = Placement::table(placement.locations(), placement.ranks(), placement.version());
  return inside;
}

void refuse_replicas_on_device(const Placement& placement, const char* what) {
  if (!placement.has_replicas()) return;
  throw UnsupportedError(
      str(what,
          ": the placement has replicas, between which kernels do not choose: use host memory, or "
          "a placement without replicas"));
}

std::unique_ptr<Backend> make_replica_backend(const Rank& rank, const Config& config,
                                              std::unique_ptr<Backend> inner) {
  return std::make_unique<ReplicaBackend>(rank, config, std::move(inner));
}

Sizes replica_backend_sizes(const Config& config, int rank, const Sizes& inner) {
  Sizes sizes = inner;
  sizes.results += std::int64_t{config.lanes} * 4 * groups_of(config, rank);
  sizes.plans += config.lanes * (id_bytes(config) + 4 * scale_count(config));
  return sizes;
}

}  // namespace ferry
