#include <cstdint>
#include <deque>
#include <limits>
#include <utility>
#include <vector>

#include "base/errors.hpp"
#include "base/mapping.hpp"
#include "base/text.hpp"
#include "exchange/configuration.hpp"
#include "exchange/device_work.hpp"
#include "exchange/overlap.hpp"
#include "exchange/source_operations.hpp"
#include "ferry/config.hpp"
#include "ferry/error.hpp"
#include "ferry/exchange.hpp"
#include "ferry/group.hpp"
#include "ferry/max.hpp"
#include "layout/plan_layout.hpp"
#include "max/host_operations.hpp"
#include "max/words.hpp"
#include "plan/shapes.hpp"

namespace ferry::max {
namespace {

// Throws UsageError if an array that the combine writes overlaps another. `known`: rows as far as the host
// knows.
void require_apart(const Config& config, const CombineInput& input, const CombineOutput& output,
                   const KnownRows& known) {
  const std::int64_t slots = config.top_k;
  const std::int64_t results = config.reduction == Reduction::unreduced ? slots : 1,
                     result_row = config.hidden * bytes_of(output.output_tokens.type);
  CallArrays arrays;
  const Outputs& rows = input.input_tokens;
  arrays.read("input_tokens", rows.data, rows.rows > 0 ? rows.rows : known.total,
              config.hidden * bytes_of(rows.type), rows.stride);
  const auto read = [&](const char* name, auto values) {
    arrays.read(name, values.data(), 1, static_cast<std::int64_t>(values.size_bytes()));
  };
  if (known.total == kUnknownRows) {
    arrays.read("src_info", input.src_info.data(), 1, kUnknownRows);
  } else {
    read("src_info", input.src_info);
  }
  read("row_offsets", input.row_offsets);
  read("counts", input.counts);
  if (input.tokens > 0)
    arrays.read("topk_ids", input.topk_ids.data, input.tokens * slots, bytes_of(input.topk_ids.type));
  arrays.read("router_weights", output.router_weights, known.tokens, 4 * slots);
  add_result("output_tokens", output.output_tokens, known.tokens * results, result_row, output.epilogue,
             arrays);
  arrays.write("shared_outputs", output.shared_outputs, config.shared_experts * known.tokens, result_row);
  arrays.require_apart("", -1);
}

// skip_a2a: each rank has its own terms of a token's sum.
void require_local_sums(const Config& config) {
  if (config.reduction == Reduction::unreduced || config.reduction_level == ReductionLevel::node) {
    throw UsageError(str("max: skip_a2a with reduction ", to_string(config.reduction),
                         " and reduction_level ", to_string(config.reduction_level),
                         ", must be partial at level rank: the sum of a rank's own experts' rows"));
  }
}

Config exchange_config(Config config) {
  if (config.placement.tp() > 1)
    throw UnsupportedError("max: experts in slices are not supported: use ferry::Exchange with its plans");
  if (config.placement.has_replicas())
    throw UnsupportedError(
        "max: a placement with replicas is not supported: use ferry::Exchange with its plans");
  if (config.layout != Layout::expert_major)
    throw UsageError(str("max: layout ", to_string(config.layout), ", must be expert_major"));
  if (config.capacity != 0) {
    throw UsageError(str("max: capacity = ", config.capacity,
                         ", must be 0: combine by src_info needs every row, so none may be dropped"));
  }
  if (config.transfer != Transfer::routed) {
    throw UsageError(str("max: transfer ", to_string(config.transfer),
                         ", must be routed: use ferry::Exchange with its plans"));
  }
  if (!config.own_receive_buffers)
    throw UsageError("max: own_receive_buffers is off, must be on: dispatch takes no memory for its rows");
  if (!config.check_calls && chosen_memory(config) == MemoryKind::host)
    throw UsageError("max: check_calls (in C manual_check) is off, must be on: every call checks its rows");
  if (config.input == Input::replicated) {
    require_local_sums(config);
    config.reduction = Reduction::partial;
  } else if (config.reduction != Reduction::unreduced) {
    config.reduction = Reduction::exact;
  }
  config.repeats = true;
  return config;
}

// Collective: if this rank refuses its configuration, the peers' construction ends too. Throws UsageError or
// UnsupportedError.
Config config_or_refuse(const Rank& rank, const Config& config) {
  return or_refuse([&](const Error& error) { refuse_configuration(rank, error); },
                   [&] { return exchange_config(config); });
}

ferry::DispatchOptions to_ferry(const DispatchOptions& options) {
  return {.call = options.call,
          .format = options.format,
          .global_scale = options.global_scale,
          .input_scales = options.input_scales};
}

}  // namespace

struct Exchange::State {
  enum class Pending { none, dispatch, combine };

  // State that a lane keeps between calls. The arrays are in the exchange's memory.
  struct LaneState {
    DescribeRowsCall arrays;
    std::int64_t* kept_ids = nullptr;     // [T, K] of the last dispatch
    std::int32_t* kept_tokens = nullptr;  // its N
    Plan plan;                            // of the combine
    float* row_tags = nullptr;            // [capacity]
    float* returned = nullptr;            // [T, K]
    std::byte* scratch = nullptr;
    std::uint64_t combine = 0;  // call number of the last one, in host memory
    Pending pending = Pending::none;
  };

  State(const Rank& rank, const Config& given)
      : exchange(in_words(kWords, [&] { return ferry::Exchange(rank, config_or_refuse(rank, given)); })),
        config(exchange.config()),
        device(make_device_work(exchange)),
        on_host(config, rank.index()),
        operations(device ? source_operations(exchange) : &on_host) {
    lanes.resize(static_cast<std::size_t>(config.lanes));
    for (LaneState& lane : lanes) allocate(lane);
  }

  template <class T>
  T* allocate(std::int64_t count) {
    const std::int64_t bytes = count * static_cast<std::int64_t>(sizeof(T));
    return reinterpret_cast<T*>(device ? device->allocate(bytes) : host_memory.emplace_back(bytes).data());
  }
  void allocate(LaneState& lane);

  LaneState& lane(int index) {
    if (index < 0 || index >= config.lanes) {
      throw UsageError(
          str("lane ", index, " does not exist: the exchange has ", counted(config.lanes, "lane")));
    }
    return lanes[static_cast<std::size_t>(index)];
  }
  LaneState& idle_lane(int index) {
    LaneState& lane = this->lane(index);
    if (lane.pending == Pending::none) return lane;
    throw UsageError(str("lane ", index, ": call ",
                         lane.pending == Pending::dispatch ? "ep_dispatch_wait" : "ep_combine_wait",
                         " first"));
  }
  LaneState& end(int index, Pending call, const char* name) {
    LaneState& lane = this->lane(index);
    if (lane.pending != call)
      throw UsageError(str("lane ", index, ": no ", name, " to wait for: call ep_", name, "_async first"));
    lane.pending = Pending::none;
    return lane;
  }

  // Keeps the ids for the combine. Called after the dispatch, which has checked the arguments.
  void keep(const LaneState& lane, const Tokens& tokens, const Ids& ids, const CallOptions& call) {
    operations->keep_ids({.options = call,
                          .ids = ids,
                          .tokens = tokens.count,
                          .device_count = tokens.device_count,
                          .kept_ids = lane.kept_ids,
                          .kept_tokens = lane.kept_tokens});
  }
  DispatchResult describe(const LaneState& lane, const ferry::DispatchResult& received,
                          const CallOptions& options);
  CombineOptions plan_combine(LaneState& lane, const CombineInput& input, const CombineOutput& output,
                              const CallOptions& options);
  void check_arguments(const CombineInput& input) const;
  template <class Combine>
  void finish_combine(const LaneState& lane, const CallOptions& options, Combine combine);

  ferry::Exchange exchange;
  const Config& config;
  std::unique_ptr<DeviceWork> device;  // null: host memory
  HostOperations on_host;
  SourceOperations* operations;
  std::deque<LocalMemory> host_memory;
  std::vector<LaneState> lanes;
};

void Exchange::State::allocate(LaneState& lane) {
  const int me = exchange.rank().index();
  const std::int64_t rows = row_capacity(config, me), groups = groups_of(config, me);
  const std::int64_t routes = std::int64_t{config.max_tokens} * config.top_k;
  const std::int64_t plan = view_plan(nullptr, plan_shape(config)).bytes;
  lane.arrays.row_offsets = allocate<std::uint32_t>(groups + 1);
  lane.arrays.expert_ids = allocate<std::int32_t>(groups + 1);
  lane.arrays.expert_usage_stats = allocate<std::uint32_t>(2);
  lane.arrays.src_info = allocate<std::int32_t>(2 * rows + 1);
  lane.arrays.counts = allocate<std::int32_t>(groups * exchange.rank().size() + 1);
  lane.kept_ids = allocate<std::int64_t>(routes + 1);
  lane.kept_tokens = allocate<std::int32_t>(1);
  lane.plan = Plan::over(allocate<std::byte>(plan), static_cast<std::size_t>(plan));
  lane.row_tags = allocate<float>(rows + 1);
  lane.returned = allocate<float>(routes + 1);
  lane.scratch = allocate<std::byte>(operations->scratch_bytes());
}

Exchange::Exchange(const Rank& rank, const Config& config) : state_(std::make_unique<State>(rank, config)) {}
Exchange::~Exchange() = default;

const Config& Exchange::config() const {
  return state_->config;
}

const Rank& Exchange::rank() const {
  return state_->exchange.rank();
}

// In host memory the arrays have as many entries as there are groups and rows, in device memory as there can
// be.
DispatchResult Exchange::State::describe(const LaneState& lane, const ferry::DispatchResult& received,
                                         const CallOptions& options) {
  DispatchResult result;
  if (received.total == nullptr) return result;
  DescribeRowsCall call = lane.arrays;
  call.options = options;
  call.received = received;
  operations->describe_rows(call);
  const auto groups = static_cast<std::size_t>(received.groups);
  const std::size_t number = device ? groups : call.expert_usage_stats[1];
  const auto rows = static_cast<std::size_t>(device ? received.capacity : *received.total);
  result.output_tokens = received.data;
  result.parts = received.parts;
  result.tile_offsets = received.tile_offsets;
  result.row_offsets = {call.row_offsets, number + 1};
  result.expert_ids = {call.expert_ids, number};
  result.expert_usage_stats = call.expert_usage_stats;
  result.src_info = {call.src_info, 2 * rows};
  result.counts = {call.counts, groups * static_cast<std::size_t>(exchange.rank().size())};
  result.capacity = received.capacity;
  result.groups = received.groups;
  result.call = received.call;
  return result;
}

void Exchange::ep_dispatch_async(const Tokens& input_tokens, const Ids& topk_ids,
                                 const DispatchOptions& options) {
  State::LaneState& state = state_->idle_lane(options.call.lane);
  in_words(kWords,
           [&] { state_->exchange.dispatch_send(input_tokens, topk_ids, nullptr, to_ferry(options)); });
  state.pending = State::Pending::dispatch;
  state_->keep(state, input_tokens, topk_ids, options.call);
}

DispatchResult Exchange::ep_dispatch_wait(const CallOptions& call) {
  const State::LaneState& state = state_->end(call.lane, State::Pending::dispatch, "dispatch");
  const ferry::DispatchResult received =
      in_words(kWords, [&] { return state_->exchange.dispatch_receive(call); });
  return state_->describe(state, received, call);
}

DispatchResult Exchange::ep_fused_dispatch(const Tokens& input_tokens, const Ids& topk_ids,
                                           const DispatchOptions& options) {
  const CallOptions& call = options.call;
  const State::LaneState& state = state_->idle_lane(call.lane);
  const auto last_call = [&] { return state_->exchange.last_dispatch_result(call.lane).call; };
  const std::uint64_t before = last_call();
  try {
    const ferry::DispatchResult received = in_words(kWords, [&] {
      return state_->exchange.dispatch(input_tokens, topk_ids, nullptr, to_ferry(options));
    });
    state_->keep(state, input_tokens, topk_ids, call);
    return state_->describe(state, received, call);
  } catch (const Error&) {  // such as ids out of range, of a dispatch that has delivered its rows
    if (last_call() != 0 && last_call() != before) state_->keep(state, input_tokens, topk_ids, call);
    throw;
  }
}

DispatchResult Exchange::last_dispatch_result(const CallOptions& call) const {
  return state_->describe(state_->lane(call.lane), state_->exchange.last_dispatch_result(call.lane), call);
}

void Exchange::State::check_arguments(const CombineInput& input) const {
  const bool kept = input.tokens == -1;
  if (kept && input.topk_ids.data != nullptr)
    throw UsageError("topk_ids without tokens; pass tokens, N of their dispatch");
  if (!device && input.row_offsets.empty())
    throw UsageError("row_offsets is empty; pass what dispatch returned");
  if (!device) return;  // the operation checks the rest
  if (!kept && (input.tokens < 0 || input.tokens > config.max_tokens))
    throw UsageError(str("tokens = ", input.tokens, ", must be 0 to max_tokens = ", config.max_tokens));
  if (!kept && input.tokens > 0 && input.topk_ids.data == nullptr)
    throw UsageError(str("topk_ids is null for ", counted(input.tokens, "token")));
  if (input.src_info.data() == nullptr || input.row_offsets.data() == nullptr ||
      input.counts.data() == nullptr)
    throw UsageError("src_info, row_offsets or counts is null; pass what dispatch returned");
}

// Makes the plan of this rank's arrays. If the host can see that they are wrong, the peers' combine ends with
// the same error.
CombineOptions Exchange::State::plan_combine(LaneState& lane, const CombineInput& input,
                                             const CombineOutput& output, const CallOptions& options) {
  const bool kept = input.tokens == -1;
  if (!device) lane.combine = next_call(exchange, options.lane);
  try {
    check_arguments(input);
    const PlanReturnCall call{.options = options,
                              .src_info = input.src_info.data(),
                              .row_offsets = input.row_offsets.data(),
                              .counts = input.counts.data(),
                              .ids = kept ? Ids(lane.kept_ids) : input.topk_ids,
                              .tokens = kept ? config.max_tokens : input.tokens,
                              .device_tokens = kept ? lane.kept_tokens : nullptr,
                              .plan = lane.plan,
                              .row_tags = lane.row_tags,
                              .scratch = lane.scratch,
                              .combine = lane.combine,
                              .lengths = {.src_info = std::ssize(input.src_info),
                                          .row_offsets = std::ssize(input.row_offsets),
                                          .counts = std::ssize(input.counts)}};
    operations->plan_return(call);
    KnownRows known;
    if (!device) known = {.tokens = lane.plan.tokens(), .total = lane.plan.total()};
    require_apart(config, input, output, known);
  } catch (const UsageError& error) {
    const UsageError named(str("ep_combine: rank ", exchange.rank().index(), ": ", error.what()));
    exchange.refuse(Operation::combine, named, options);
    throw named;
  }
  return {.call = options,
          .topk_weights = output.router_weights,
          .row_values = lane.row_tags,
          .route_values = lane.returned,
          .shared_outputs = output.shared_outputs,
          .epilogue = output.epilogue};
}

// Runs the combine or its receive phase. A row that has not come back is reported as such, not as an entry of
// a plan that the caller has never seen.
template <class Combine>
void Exchange::State::finish_combine(const LaneState& lane, const CallOptions& options, Combine combine) {
  const CheckReturnedCall check{
      .options = options, .plan = lane.plan, .returned = lane.returned, .combine = lane.combine};
  try {
    in_words(kWords, combine);
  } catch (const BadSourceError&) {
    operations->check_returned(check);
    throw;
  }
  operations->check_returned(check);
}

void Exchange::ep_combine_async(const CombineInput& input, const CombineOutput& output,
                                const CallOptions& call) {
  State::LaneState& state = state_->idle_lane(call.lane);
  const CombineOptions options = state_->plan_combine(state, input, output, call);
  in_words(kWords, [&] {
    state_->exchange.combine_send(input.input_tokens, state.plan, output.output_tokens, options);
  });
  state.pending = State::Pending::combine;
}

void Exchange::ep_combine_wait(const CallOptions& call) {
  const State::LaneState& state = state_->end(call.lane, State::Pending::combine, "combine");
  state_->finish_combine(state, call, [&] { state_->exchange.combine_receive(call); });
}

void Exchange::ep_fused_combine(const CombineInput& input, const CombineOutput& output,
                                const CallOptions& call) {
  State::LaneState& state = state_->idle_lane(call.lane);
  const CombineOptions options = state_->plan_combine(state, input, output, call);
  state_->finish_combine(state, call, [&] {
    state_->exchange.combine(input.input_tokens, state.plan, output.output_tokens, options);
  });
}

void Exchange::synchronize(const CallOptions& call) {
  in_words(kWords, [&] { state_->exchange.synchronize(call); });
}

void Exchange::check(int lane) {
  in_words(kWords, [&] { state_->exchange.check(lane); });
}

void Exchange::refuse(Operation operation, const Error& error, const CallOptions& call) noexcept {
  if (call.lane < 0 || call.lane >= state_->config.lanes) return;
  const State::LaneState& state = state_->lanes[static_cast<std::size_t>(call.lane)];
  if (state.pending != State::Pending::none) return;
  state_->exchange.refuse(operation, error, call);
}

Config skip_a2a(Config config, int allreduce_world_size) {
  config.input = Input::replicated;
  if (config.shared_experts > 0) config.shared_split = allreduce_world_size;
  return config;
}

GroupIndex group_index(std::span<const std::int32_t> counts, int alignment) {
  if (alignment < 1) throw UsageError(str("alignment = ", alignment, ", must be 1 or more"));
  GroupIndex index;
  std::int64_t row = 0;
  index.row_offsets.push_back(0);
  for (std::size_t group = 0; group < counts.size(); ++group) {
    const std::int32_t count = counts[group];
    if (count < 0) throw UsageError(str("counts[", group, "] = ", count, ", must be 0 or more"));
    if (count == 0) continue;
    row = align_up(row + count, alignment);
    if (row > std::numeric_limits<std::int32_t>::max()) {
      throw UsageError(str("counts[0] to counts[", group, "] add up to ", row, " rows, must be at most ",
                           std::numeric_limits<std::int32_t>::max()));
    }
    index.expert_ids.push_back(static_cast<std::int32_t>(group));
    index.row_offsets.push_back(static_cast<std::uint32_t>(row));
  }
  return index;
}

}  // namespace ferry::max
