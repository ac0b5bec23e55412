#include <utility>
#include <vector>

#include "base/text.hpp"
#include "exchange/configuration.hpp"
#include "exchange/device_work.hpp"
#include "exchange/source_operations.hpp"
#include "ferry/error.hpp"
#include "ferry/max_device.hpp"
#include "layout/plan_layout.hpp"
#include "max/exchange_config.hpp"
#include "max/overlap.hpp"
#include "max/words.hpp"
#include "plan/shapes.hpp"

namespace ferry::max {
namespace {

SourceOperations& operations_of(const ferry::Exchange& exchange) {
  SourceOperations* const operations = source_operations(exchange);
  if (operations != nullptr) return *operations;
  if (exchange.config().memory == MemoryKind::device)
    throw UnsupportedError("max: the backend cuda has one hop: pass hops one, or use the backend collective");
  throw UnsupportedError(str("max: the backend ", to_string(exchange.config().backend),
                             " has host memory: use max::Exchange, or the backend cuda"));
}

}  // namespace

struct DeviceExchange::State {
  enum class Pending { none, dispatch, combine };

  // A lane's arrays, in device memory.
  struct LaneState {
    DescribeRowsCall arrays;
    std::int64_t* kept_ids = nullptr;     // [T, K]
    std::int32_t* kept_tokens = nullptr;  // their N
    Plan plan;                            // of the combine
    float* row_tags = nullptr;            // [capacity]
    float* returned = nullptr;            // [T, K]
    std::byte* scratch = nullptr;
    Pending pending = Pending::none;
  };

  State(const Rank& rank, const Config& given)
      : exchange(rank, config_or_refuse(rank, given)),
        config(exchange.config()),
        operations(operations_of(exchange)),
        device(make_device_work(exchange)) {
    lanes.resize(static_cast<std::size_t>(config.lanes));
    for (std::size_t lane = 0; lane < lanes.size(); ++lane) allocate(static_cast<int>(lane), lanes[lane]);
  }

  template <class T>
  T* allocate(std::int64_t count) {
    return reinterpret_cast<T*>(device->allocate(count * static_cast<std::int64_t>(sizeof(T))));
  }
  void allocate(int index, LaneState& lane) {
    const int me = exchange.rank().index();
    const std::int64_t rows = row_capacity(config, me), groups = groups_of(config, me);
    const std::int64_t routes = std::int64_t{config.max_tokens} * config.top_k;
    const std::int64_t plan = view_plan(nullptr, plan_shape(config)).bytes;
    lane.arrays.lane = index;
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
    lane.scratch = allocate<std::byte>(operations.scratch_bytes());
  }

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

  // Keeps the ids for the combine. Called after the dispatch, which has checked the arguments.
  void keep(const LaneState& lane, const Tokens& tokens, const Ids& ids, Stream stream) {
    operations.keep_ids({.lane = lane.arrays.lane,
                         .ids = ids,
                         .tokens = tokens.count,
                         .device_count = tokens.device_count,
                         .kept_ids = lane.kept_ids,
                         .kept_tokens = lane.kept_tokens},
                        stream);
  }
  DeviceDispatchResult describe(const LaneState& lane, const ferry::DispatchResult& received, Stream stream);
  CombineOptions plan_combine(const LaneState& lane, const DeviceCombineInput& input,
                              const CombineOutput& output, Stream stream);
  void check_returned(const LaneState& lane, Stream stream) {
    operations.check_returned({.lane = lane.arrays.lane, .plan = lane.plan, .returned = lane.returned},
                              stream);
  }

  ferry::Exchange exchange;
  const Config& config;
  SourceOperations& operations;
  std::unique_ptr<DeviceWork> device;
  std::vector<LaneState> lanes;
};

DeviceExchange::DeviceExchange(const Rank& rank, const Config& config)
    : state_(std::make_unique<State>(rank, config)) {}
DeviceExchange::~DeviceExchange() = default;

const Config& DeviceExchange::config() const {
  return state_->config;
}

const Rank& DeviceExchange::rank() const {
  return state_->exchange.rank();
}

DeviceDispatchResult DeviceExchange::State::describe(const LaneState& lane,
                                                     const ferry::DispatchResult& received, Stream stream) {
  DescribeRowsCall call = lane.arrays;
  call.received = received;
  operations.describe_rows(call, stream);
  DeviceDispatchResult result;
  result.output_tokens = received.data;
  result.parts = received.parts;
  result.tile_offsets = received.tile_offsets;
  result.row_offsets = call.row_offsets;
  result.expert_ids = call.expert_ids;
  result.expert_usage_stats = call.expert_usage_stats;
  result.src_info = call.src_info;
  result.counts = call.counts;
  result.capacity = received.capacity;
  result.groups = received.groups;
  return result;
}

void DeviceExchange::ep_dispatch_async(const Tokens& input_tokens, const Ids& topk_ids, int lane,
                                       Stream stream, const TokenFormat& format) {
  State::LaneState& state = state_->idle_lane(lane);
  in_words(kWords, [&] {
    state_->exchange.dispatch_send(input_tokens, topk_ids, nullptr, dispatch_options(format, lane), stream);
  });
  state.pending = State::Pending::dispatch;
  state_->keep(state, input_tokens, topk_ids, stream);
}

DeviceDispatchResult DeviceExchange::ep_dispatch_wait(int lane, Stream stream) {
  State::LaneState& state = state_->lane(lane);
  if (state.pending != State::Pending::dispatch)
    throw UsageError(str("lane ", lane, ": no dispatch to wait for: call ep_dispatch_async first"));
  state.pending = State::Pending::none;
  const ferry::DispatchResult received =
      in_words(kWords, [&] { return state_->exchange.dispatch_receive(lane, stream); });
  return state_->describe(state, received, stream);
}

DeviceDispatchResult DeviceExchange::ep_fused_dispatch(const Tokens& input_tokens, const Ids& topk_ids,
                                                       int lane, Stream stream, const TokenFormat& format) {
  const State::LaneState& state = state_->idle_lane(lane);
  const ferry::DispatchResult received = in_words(kWords, [&] {
    return state_->exchange.dispatch(input_tokens, topk_ids, nullptr, dispatch_options(format, lane), stream);
  });
  state_->keep(state, input_tokens, topk_ids, stream);
  return state_->describe(state, received, stream);
}

// Enqueues the kernels that make the plan. If this rank can see that the arguments are wrong, the peers'
// combine ends with the same error.
CombineOptions DeviceExchange::State::plan_combine(const LaneState& lane, const DeviceCombineInput& input,
                                                   const CombineOutput& output, Stream stream) {
  const int index = lane.arrays.lane;
  const bool kept = input.tokens == -1;
  try {
    if (kept && input.topk_ids.data != nullptr)
      throw UsageError("topk_ids without tokens; pass tokens, N of their dispatch");
    if (!kept && (input.tokens < 0 || input.tokens > config.max_tokens))
      throw UsageError(str("tokens = ", input.tokens, ", must be 0 to max_tokens = ", config.max_tokens));
    if (!kept && input.tokens > 0 && input.topk_ids.data == nullptr)
      throw UsageError(str("topk_ids is null for ", counted(input.tokens, "token")));
    if (input.src_info == nullptr || input.row_offsets == nullptr || input.counts == nullptr)
      throw UsageError("src_info, row_offsets or counts is null; pass what dispatch returned");
    const std::int64_t groups = groups_of(config, exchange.rank().index());
    require_apart(config,
                  {.src_info = input.src_info,
                   .row_offsets = input.row_offsets,
                   .counts = input.counts,
                   .src_info_bytes = kUnknownRows,
                   .row_offsets_bytes = 4 * (groups + 1),
                   .counts_bytes = 4 * groups * exchange.rank().size(),
                   .topk_ids = input.topk_ids,
                   .ids = kept ? 0 : input.tokens * config.top_k},
                  input.input_tokens, output, {});
    operations.plan_return({.lane = index,
                            .src_info = input.src_info,
                            .row_offsets = input.row_offsets,
                            .counts = input.counts,
                            .ids = kept ? Ids(lane.kept_ids) : input.topk_ids,
                            .tokens = kept ? config.max_tokens : input.tokens,
                            .device_tokens = kept ? lane.kept_tokens : nullptr,
                            .plan = lane.plan,
                            .row_tags = lane.row_tags,
                            .scratch = lane.scratch},
                           stream);
  } catch (const UsageError& error) {
    const UsageError named(str("ep_combine: rank ", exchange.rank().index(), ": ", error.what()));
    exchange.refuse(Operation::combine, index, named, stream);
    throw named;
  }
  return {.topk_weights = output.router_weights,
          .row_values = lane.row_tags,
          .route_values = lane.returned,
          .shared_outputs = output.shared_outputs,
          .epilogue = output.epilogue,
          .lane = index};
}

void DeviceExchange::ep_combine_async(const DeviceCombineInput& input, const CombineOutput& output, int lane,
                                      Stream stream) {
  State::LaneState& state = state_->idle_lane(lane);
  const CombineOptions options = state_->plan_combine(state, input, output, stream);
  in_words(kWords, [&] {
    state_->exchange.combine_send(input.input_tokens, state.plan, output.output_tokens, options, stream);
  });
  state.pending = State::Pending::combine;
}

void DeviceExchange::ep_combine_wait(int lane, Stream stream) {
  State::LaneState& state = state_->lane(lane);
  if (state.pending != State::Pending::combine)
    throw UsageError(str("lane ", lane, ": no combine to wait for: call ep_combine_async first"));
  state.pending = State::Pending::none;
  in_words(kWords, [&] { state_->exchange.combine_receive(lane, stream); });
  state_->check_returned(state, stream);
}

void DeviceExchange::ep_fused_combine(const DeviceCombineInput& input, const CombineOutput& output, int lane,
                                      Stream stream) {
  const State::LaneState& state = state_->idle_lane(lane);
  const CombineOptions options = state_->plan_combine(state, input, output, stream);
  in_words(kWords, [&] {
    state_->exchange.combine(input.input_tokens, state.plan, output.output_tokens, options, stream);
  });
  state_->check_returned(state, stream);
}

void DeviceExchange::synchronize(int lane, Stream stream) {
  in_words(kWords, [&] { state_->exchange.synchronize(lane, stream); });
}

void DeviceExchange::check(int lane) {
  in_words(kWords, [&] { state_->exchange.check(lane); });
}

void DeviceExchange::refuse(Operation operation, int lane, const Error& error, Stream stream) noexcept {
  if (lane < 0 || lane >= state_->config.lanes) return;
  if (state_->lanes[static_cast<std::size_t>(lane)].pending != State::Pending::none) return;
  state_->exchange.refuse(operation, lane, error, stream);
}

}  // namespace ferry::max
