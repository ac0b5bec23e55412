#include "exchange/replicas.hpp"

#include <cstdint>
#include <cstring>
#include <utility>

#include "base/errors.hpp"
#include "base/integers.hpp"
#include "base/mapping.hpp"
#include "exchange/device_work.hpp"
#include "exchange/lane_counts.hpp"
#include "plan/shapes.hpp"

namespace ferry {
namespace {

// Offsets of a lane's arrays in its memory.
struct ReplicaArrays {
  std::int64_t group_expert = 0;  // int32 [G]
  std::int64_t result_bytes = 0;  // bytes of the array above
  std::int64_t ids = 0;           // int64 [T, K]; the next dispatch overwrites it
  std::int64_t scales = 0;        // fp32 [P + S]; the same
  std::int64_t first = 0;         // int32 [E + 1]
  std::int64_t expert_of = 0;     // int32 [P + S]
  std::int64_t bytes = 0;
};

std::int32_t scale_count(const Config& config) {
  return config.placement.total_replicas() + config.shared_experts;
}

ReplicaArrays replica_arrays(const Config& config, int rank) {
  ReplicaArrays arrays;
  std::int64_t end = 0;
  const auto take = [&](std::int64_t bytes) { return std::exchange(end, align_up(end + bytes, 256)); };
  arrays.group_expert = take(4 * groups_of(config, rank));
  arrays.result_bytes = end;
  arrays.ids = take(8 * std::int64_t{config.max_tokens} * config.top_k);
  arrays.scales = take(4 * scale_count(config));
  arrays.first = take(4 * (config.experts + 1));
  arrays.expert_of = take(4 * scale_count(config));
  arrays.bytes = end;
  return arrays;
}

class ReplicaBackend final : public Backend {
 public:
  ReplicaBackend(const Rank& rank, const Config& config, std::unique_ptr<Backend> inner,
                 std::vector<std::unique_ptr<ReplicaLane>> lanes)
      : config_(config),
        me_(rank.index()),
        arrays_(replica_arrays(config, me_)),
        inner_(std::move(inner)),
        lanes_(std::move(lanes)) {
    std::vector<std::int32_t> first = {0};
    for (int expert = 0; expert < config.experts; ++expert) {
      const auto replicas = static_cast<std::int32_t>(config.placement.replicas_of(expert).size());
      first.push_back(first.back() + replicas);
      expert_of_.resize(static_cast<std::size_t>(first.back()), expert);
    }
    for (int shared = 0; shared < config.shared_experts; ++shared)
      expert_of_.push_back(config.experts + shared);
    for (int lane = 0; lane < config.lanes; ++lane) {
      write(lane, arrays_.group_expert, group_experts(config, me_));
      write(lane, arrays_.first, first);
      write(lane, arrays_.expert_of, expert_of_);
    }
  }

  Capabilities capabilities() const override { return inner_->capabilities(); }
  Sizes sizes() const override { return replica_backend_sizes(config_, me_, inner_->sizes()); }

  DispatchResult dispatch(const DispatchCall& given, bool split) override {
    DispatchCall call = given;
    const bool by_ids = given.plan.empty();
    ReplicaChoice choice = choice_of(given.options.lane);
    if (by_ids) {
      choice = choosing(choice, given.ids, given.tokens.count);
      choice.device_tokens = given.tokens.device_count;
      call.ids = Ids(choice.chosen);
    }
    if (!given.input_scales.empty()) {
      choice.scales = given.input_scales.data();
      choice.scale_count = scale_count(config_);
      call.input_scales = {choice.chosen_scales, expert_of_.size()};
    }
    choose(Operation::dispatch, choice, given);
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
    const ReplicaChoice choice = choosing(choice_of(call.options.lane), call.ids, call.tokens);
    choose(Operation::dispatch_counts, choice, *counts);
    call.ids = Ids(choice.chosen);
    return inner_->run(call);
  }

  OwnArrays own_arrays(int lane) const override { return inner_->own_arrays(lane); }
  std::unique_ptr<DeviceWork> make_device_work() const override { return inner_->make_device_work(); }
  void refuse(Operation operation, const Error& error, const CallOptions& call) noexcept override {
    inner_->refuse(operation, error, call);
  }
  void synchronize(const CallOptions& call) override { inner_->synchronize(call); }
  void raise_device_error(int lane) override { inner_->raise_device_error(lane); }

  CallDiagnostics take_diagnostics(int lane) override {
    CallDiagnostics found = inner_->take_diagnostics(lane);
    if (found.bad_id.count > 0) found.bad_id.id = id_outside(found.bad_id.id, replicas() - config_.experts);
    int& expert = found.bad_scale.expert;
    if (expert >= 0) expert = expert_of_[static_cast<std::size_t>(expert)];
    return found;
  }

  LoadCounts load_counts() const override {
    const LoadCounts inside = inner_->load_counts();
    LoadCounts sum = no_load(config_);
    sum.dispatches = inside.dispatches;
    sum.ranks = inside.ranks;
    const auto replicas = static_cast<std::size_t>(this->replicas());
    for (std::size_t i = 0; i < inside.layers.size(); ++i) {
      const auto expert = static_cast<std::size_t>(expert_of_[i % replicas]);
      sum.experts[expert] += inside.layers[i];
      sum.layers[i / replicas * sum.experts.size() + expert] += inside.layers[i];
    }
    return sum;
  }
  WireCounts wire_counts() const override { return inner_->wire_counts(); }
  void add_waits(WaitTimes& sum) const override { inner_->add_waits(sum); }

 private:
  ReplicaLane& lane(int index) { return *lanes_[static_cast<std::size_t>(index)]; }
  std::int32_t replicas() const { return config_.placement.total_replicas(); }

  template <class T>
  T* array(int index, std::int64_t offset) {
    return reinterpret_cast<T*>(lane(index).memory() + offset);
  }
  void write(int index, std::int64_t offset, const std::vector<std::int32_t>& values) {
    lane(index).write(array<std::int32_t>(index, offset), values.data(),
                      static_cast<std::int64_t>(values.size() * sizeof(std::int32_t)));
  }

  // A choice of no route and no scale.
  ReplicaChoice choice_of(int index) {
    ReplicaChoice choice{};
    choice.source = config_.input == Input::replicated ? 0 : me_;
    choice.top_k = config_.top_k;
    choice.experts = config_.experts;
    choice.replicas = replicas();
    choice.first = array<std::int32_t>(index, arrays_.first);
    choice.chosen = array<std::int64_t>(index, arrays_.ids);
    choice.expert_of = array<std::int32_t>(index, arrays_.expert_of);
    choice.chosen_scales = array<float>(index, arrays_.scales);
    return choice;
  }
  static ReplicaChoice choosing(ReplicaChoice choice, const Ids& ids, std::int64_t tokens) {
    choice.ids = ids.data;
    choice.wide_ids = ids.type == IdType::int64;
    choice.tokens = static_cast<std::int32_t>(tokens);
    return choice;
  }
  template <class Call>
  void choose(Operation operation, const ReplicaChoice& choice, const Call& call) {
    if (choice.tokens == 0 && choice.scale_count == 0) return;
    or_refuse([&](const Error& error) { refuse(operation, error, call.options); },
              [&] {
                lane(call.options.lane).check_pointers(call);
                lane(call.options.lane).choose(choice, call.options);
              });
  }

  DispatchResult outside(DispatchResult result, const CallOptions& call) {
    result.group_expert = array<std::int32_t>(call.lane, arrays_.group_expert);
    return result;
  }

  const Config config_;
  const int me_;
  const ReplicaArrays arrays_;
  const std::unique_ptr<Backend> inner_;
  const std::vector<std::unique_ptr<ReplicaLane>> lanes_;
  std::vector<std::int32_t> expert_of_;  // [P + S]
};

class HostLane final : public ReplicaLane {
 public:
  explicit HostLane(std::int64_t bytes) : memory_(bytes) {}

  std::byte* memory() override { return memory_.data(); }
  void write(void* to, const void* from, std::int64_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
  void choose(const ReplicaChoice& choice, const CallOptions&) override { choice.choose_share(0, 1); }

 private:
  LocalMemory memory_;
};

}  // namespace

Config replica_config(const Config& config) {
  const Placement& placement = config.placement;
  Config inside = config;
  inside.experts = placement.total_replicas();
  inside.placement = Placement::table(placement.locations(), placement.ranks(), placement.version());
  return inside;
}

std::int64_t replica_lane_bytes(const Config& config, int rank) {
  return replica_arrays(config, rank).bytes;
}

std::unique_ptr<Backend> wrap_in_replicas(const Rank& rank, const Config& config,
                                          std::unique_ptr<Backend> inner,
                                          std::vector<std::unique_ptr<ReplicaLane>> lanes) {
  return std::make_unique<ReplicaBackend>(rank, config, std::move(inner), std::move(lanes));
}

std::unique_ptr<Backend> make_replica_backend(const Rank& rank, const Config& config,
                                              std::unique_ptr<Backend> inner) {
  std::vector<std::unique_ptr<ReplicaLane>> lanes;
  for (int lane = 0; lane < config.lanes; ++lane)
    lanes.push_back(std::make_unique<HostLane>(replica_lane_bytes(config, rank.index())));
  return wrap_in_replicas(rank, config, std::move(inner), std::move(lanes));
}

Sizes replica_backend_sizes(const Config& config, int rank, const Sizes& inner) {
  const ReplicaArrays arrays = replica_arrays(config, rank);
  Sizes sizes = inner;
  sizes.results += config.lanes * arrays.result_bytes;
  sizes.plans += config.lanes * (arrays.bytes - arrays.result_bytes);
  return sizes;
}

}  // namespace ferry
