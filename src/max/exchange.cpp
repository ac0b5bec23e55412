#include <algorithm>
#include <new>
#include <utility>

#include "base/text.hpp"
#include "exchange/configuration.hpp"
#include "ferry/error.hpp"
#include "ferry/max.hpp"
#include "max/exchange_config.hpp"
#include "max/overlap.hpp"
#include "max/returned_rows.hpp"
#include "max/words.hpp"
#include "plan/shapes.hpp"

namespace ferry::max {
namespace {

UnsupportedError device_memory_error() {
  return UnsupportedError(
      "max: arrays in device memory are those of max::DeviceExchange (ferry/max_device.hpp); max::Exchange "
      "has host memory");
}

Config host_config(const Rank& rank, const Config& given) {
  if (has_kernels(given.backend) || given.memory == MemoryKind::device) {
    refuse_configuration(rank, device_memory_error());
    throw device_memory_error();
  }
  return config_or_refuse(rank, given);
}

}  // namespace

struct Exchange::State {
  struct FreeAligned {
    static constexpr std::align_val_t kAlign{64};
    void operator()(void* memory) const { ::operator delete(memory, kAlign); }
  };

  enum class Pending { none, dispatch, combine };

  // State that a lane keeps between calls.
  struct LaneState {
    std::vector<std::int64_t> topk_ids;  // [N, K] of the last dispatch
    std::int64_t tokens = 0;             // its N
    std::uint64_t combines = 0;          // the same number on every rank
    Pending pending = Pending::none;
    std::unique_ptr<void, FreeAligned> plan;
    ReturnTags tags;
    std::vector<float> returned;  // [N, K]
  };

  State(const Rank& rank, const Config& given)
      : me(rank.index()), exchange(rank, host_config(rank, given)), config(exchange.config()) {
    if (config.memory == MemoryKind::device) throw device_memory_error();
    lanes.resize(static_cast<std::size_t>(config.lanes));
  }

  LaneState& idle_lane(int index) {
    LaneState& lane = this->lane(index);
    if (lane.pending == Pending::none) return lane;
    throw UsageError(str("lane ", index, ": call ",
                         lane.pending == Pending::dispatch ? "ep_dispatch_wait" : "ep_combine_wait",
                         " first"));
  }
  LaneState& lane(int index) {
    if (index < 0 || index >= config.lanes) {
      throw UsageError(
          str("lane ", index, " does not exist: the exchange has ", counted(config.lanes, "lane")));
    }
    return lanes[static_cast<std::size_t>(index)];
  }

  void keep_ids(LaneState& lane, const Tokens& tokens, const Ids& ids) const;
  DispatchResult result_of(const ferry::DispatchResult& received) const;
  Plan plan_combine(LaneState& lane, const CombineInput& input, const CombineOutput& output, int index);
  CombineOptions options_of(LaneState& lane, const CombineOutput& output, int index) const;
  void check_came(const LaneState& lane) const;
  template <class Combine>
  void finish_combine(const LaneState& lane, Combine combine) const;

  int me;
  ferry::Exchange exchange;
  const Config& config;
  std::vector<LaneState> lanes;
};

Exchange::Exchange(const Rank& rank, const Config& config) : state_(std::make_unique<State>(rank, config)) {}
Exchange::~Exchange() = default;

const Config& Exchange::config() const {
  return state_->config;
}

const Rank& Exchange::rank() const {
  return state_->exchange.rank();
}

void Exchange::State::keep_ids(LaneState& lane, const Tokens& tokens, const Ids& ids) const {
  lane.tokens = tokens.count;
  lane.topk_ids.resize(static_cast<std::size_t>(tokens.count * config.top_k));
  if (ids.type == IdType::int32) {
    std::copy_n(static_cast<const std::int32_t*>(ids.data), lane.topk_ids.size(), lane.topk_ids.begin());
  } else {
    std::copy_n(static_cast<const std::int64_t*>(ids.data), lane.topk_ids.size(), lane.topk_ids.begin());
  }
}

void Exchange::ep_dispatch_async(const Tokens& input_tokens, const Ids& topk_ids, int lane,
                                 const TokenFormat& format) {
  State::LaneState& state = state_->idle_lane(lane);
  in_words(kWords, [&] {
    state_->exchange.dispatch_send(input_tokens, topk_ids, nullptr, dispatch_options(format, lane));
  });
  state.pending = State::Pending::dispatch;
  state_->keep_ids(state, input_tokens, topk_ids);
}

DispatchResult Exchange::ep_dispatch_wait(int lane) {
  State::LaneState& state = state_->lane(lane);
  if (state.pending != State::Pending::dispatch)
    throw UsageError(str("lane ", lane, ": no dispatch to wait for: call ep_dispatch_async first"));
  state.pending = State::Pending::none;
  return state_->result_of(in_words(kWords, [&] { return state_->exchange.dispatch_receive(lane); }));
}

DispatchResult Exchange::ep_fused_dispatch(const Tokens& input_tokens, const Ids& topk_ids, int lane,
                                           const TokenFormat& format) {
  State::LaneState& state = state_->idle_lane(lane);
  const auto last_call = [&] { return state_->exchange.last_dispatch_result(lane).call; };
  const std::uint64_t before = last_call();
  try {
    const ferry::DispatchResult received = in_words(kWords, [&] {
      return state_->exchange.dispatch(input_tokens, topk_ids, nullptr, dispatch_options(format, lane));
    });
    state_->keep_ids(state, input_tokens, topk_ids);
    return state_->result_of(received);
  } catch (const Error&) {  // such as ids out of range, of a dispatch that has delivered its rows
    if (last_call() != 0 && last_call() != before) state_->keep_ids(state, input_tokens, topk_ids);
    throw;
  }
}

DispatchResult Exchange::last_dispatch_result(int lane) const {
  return state_->result_of(state_->exchange.last_dispatch_result(lane));
}

DispatchResult Exchange::State::result_of(const ferry::DispatchResult& received) const {
  DispatchResult result;
  if (received.total == nullptr) return result;
  result.output_tokens = received.data;
  result.parts = received.parts;
  result.tile_offsets = received.tile_offsets;
  result.call = received.call;
  GroupIndex index =
      group_index({received.counts, static_cast<std::size_t>(received.groups)}, config.alignment);
  result.expert_usage_stats[1] = static_cast<std::uint32_t>(index.number());
  for (int group = 0; group < received.groups; ++group) {
    result.expert_usage_stats[0] =
        std::max(result.expert_usage_stats[0], static_cast<std::uint32_t>(received.counts[group]));
  }
  result.row_offsets = std::move(index.row_offsets);
  result.expert_ids = std::move(index.expert_ids);
  result.src_info.reserve(2 * static_cast<std::size_t>(*received.total));
  for (std::int64_t row = 0; row < *received.total; ++row) {
    result.src_info.push_back(received.source[row].token);
    result.src_info.push_back(received.source[row].slot);
  }
  const std::span<const std::int32_t> routes = received.plan.counts();
  const int ranks = config.placement.ranks();
  for (int group = 0; group < received.groups; ++group) {
    const int expert = received.group_expert[group];
    for (int source = 0; source < ranks; ++source) {
      const bool shared = expert >= config.experts;
      const std::int32_t own = source == me ? received.counts[group] : 0;
      result.counts.push_back(shared ? own
                                     : routes[static_cast<std::size_t>(source * config.experts + expert)]);
    }
  }
  return result;
}

// Makes the plan of this rank's arrays. If they are wrong, the peers' combine ends with the same error.
Plan Exchange::State::plan_combine(LaneState& lane, const CombineInput& input, const CombineOutput& output,
                                   int index) {
  ++lane.combines;
  const PlanShape shape = plan_shape(config);
  const auto bytes = static_cast<std::size_t>(view_plan(nullptr, shape).bytes);
  try {
    if (!lane.plan) lane.plan.reset(::operator new(bytes, FreeAligned::kAlign));
    const bool kept = input.tokens == -1;
    const ReturnedRows rows{.src_info = input.src_info,
                            .row_offsets = input.row_offsets,
                            .counts = input.counts,
                            .topk_ids = kept ? Ids(lane.topk_ids.data()) : input.topk_ids,
                            .tokens = kept ? lane.tokens : input.tokens};
    if (kept && input.topk_ids.data != nullptr)
      throw UsageError("topk_ids without tokens; pass tokens, N of their dispatch");
    if (rows.row_offsets.empty()) throw UsageError("row_offsets is empty; pass what dispatch returned");
    const PlanView plan = view_plan(lane.plan.get(), shape);
    plan_return(config, me, rows, lane.combines, plan, lane.tags);
    require_apart(config,
                  {.src_info = rows.src_info.data(),
                   .row_offsets = rows.row_offsets.data(),
                   .counts = rows.counts.data(),
                   .src_info_bytes = static_cast<std::int64_t>(rows.src_info.size_bytes()),
                   .row_offsets_bytes = static_cast<std::int64_t>(rows.row_offsets.size_bytes()),
                   .counts_bytes = static_cast<std::int64_t>(rows.counts.size_bytes()),
                   .topk_ids = rows.topk_ids,
                   .ids = rows.tokens * config.top_k},
                  input.input_tokens, output, {.tokens = rows.tokens, .total = plan.header->total});
  } catch (const UsageError& error) {
    const UsageError named(str("ep_combine: rank ", me, ": ", error.what()));
    exchange.refuse(Operation::combine, index, named);
    throw named;
  }
  return Plan::over(lane.plan.get(), bytes);
}

CombineOptions Exchange::State::options_of(LaneState& lane, const CombineOutput& output, int index) const {
  lane.tags.rows.resize(std::max<std::size_t>(lane.tags.rows.size(), 1));  // an address, also without rows
  lane.returned.assign(std::max<std::size_t>(lane.tags.routes.size(), 1), 0.0f);
  return {.topk_weights = output.router_weights,
          .row_values = lane.tags.rows.data(),
          .route_values = lane.returned.data(),
          .shared_outputs = output.shared_outputs,
          .epilogue = output.epilogue,
          .lane = index};
}

void Exchange::State::check_came(const LaneState& lane) const {
  try {
    check_returned(config, view_plan(lane.plan.get(), plan_shape(config)), lane.tags, lane.returned);
  } catch (const UsageError& error) {
    throw UsageError(str("ep_combine: ", error.what()));
  }
}

// Runs the combine or its receive phase. A row that has not come back is reported as such, not as an entry of
// a plan that the caller has never seen.
template <class Combine>
void Exchange::State::finish_combine(const LaneState& lane, Combine combine) const {
  try {
    in_words(kWords, combine);
  } catch (const BadSourceError&) {
    check_came(lane);
    throw;
  }
  check_came(lane);
}

void Exchange::ep_combine_async(const CombineInput& input, const CombineOutput& output, int lane) {
  State::LaneState& state = state_->idle_lane(lane);
  const Plan plan = state_->plan_combine(state, input, output, lane);
  in_words(kWords, [&] {
    state_->exchange.combine_send(input.input_tokens, plan, output.output_tokens,
                                  state_->options_of(state, output, lane));
  });
  state.pending = State::Pending::combine;
}

void Exchange::ep_combine_wait(int lane) {
  State::LaneState& state = state_->lane(lane);
  if (state.pending != State::Pending::combine)
    throw UsageError(str("lane ", lane, ": no combine to wait for: call ep_combine_async first"));
  state.pending = State::Pending::none;
  state_->finish_combine(state, [&] { state_->exchange.combine_receive(lane); });
}

void Exchange::ep_fused_combine(const CombineInput& input, const CombineOutput& output, int lane) {
  State::LaneState& state = state_->idle_lane(lane);
  const Plan plan = state_->plan_combine(state, input, output, lane);
  state_->finish_combine(state, [&] {
    state_->exchange.combine(input.input_tokens, plan, output.output_tokens,
                             state_->options_of(state, output, lane));
  });
}

void Exchange::refuse(Operation operation, int lane, const Error& error) noexcept {
  if (lane < 0 || lane >= state_->config.lanes) return;
  State::LaneState& state = state_->lanes[static_cast<std::size_t>(lane)];
  if (state.pending != State::Pending::none) return;
  if (operation == Operation::combine) ++state.combines;
  state_->exchange.refuse(operation, lane, error);
}

}  // namespace ferry::max
