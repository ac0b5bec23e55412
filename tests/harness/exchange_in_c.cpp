// The operations of ferry::Exchange, called through the C interface. Statuses become exceptions again.

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "capi/boundary.hpp"
#include "capi/convert.hpp"
#include "ferry/ferry.h"
#include "harness/foreign_exchange.hpp"

namespace ferry::contract {
namespace {

template <class T>
T sized() {
  T value{};
  value.size = sizeof value;
  return value;
}

ferry_tokens to_c(const Tokens& tokens) {
  ferry_tokens c{};
  std::copy(tokens.parts.begin(), tokens.parts.end(), c.parts);
  std::copy(tokens.strides.begin(), tokens.strides.end(), c.strides);
  c.count = tokens.count;
  c.type = static_cast<std::int32_t>(tokens.type);
  c.device_count = tokens.device_count;
  return c;
}

template <class Rows>
ferry_rows rows_of(void* data, const Rows& rows) {
  ferry_rows c{};
  c.data = data;
  c.stride = rows.stride;
  c.type = static_cast<std::int32_t>(rows.type);
  c.rows = rows.rows;
  return c;
}

ferry_plan to_c(const Plan& plan) {
  return {.storage = plan.storage(), .bytes = plan.bytes(), .call = plan.call(), .reserved = {}};
}

ferry_receive_buffers to_c(const ReceiveBuffers& memory) {
  ferry_receive_buffers c{};
  std::copy(memory.parts.begin(), memory.parts.end(), c.parts);
  c.weight = memory.weight;
  c.local_ids = memory.local_ids;
  c.group_of_row = memory.group_of_row;
  c.plan = memory.plan;
  c.counts = memory.counts;
  c.row_offsets = memory.row_offsets;
  c.dots = memory.dots;
  c.count_sums = memory.count_sums;
  c.rows = memory.rows;
  c.allow_truncation = memory.allow_truncation;
  return c;
}

ferry_call_options to_c(const CallOptions& call) {
  return {.lane = call.lane, .sm_limit = call.sm_limit, .stream = call.stream.handle, .reserved = {}};
}

// By its name, as a user would choose it.
ferry_format to_c(const std::optional<Format>& format) {
  ferry_format c{};
  if (format && ferry_parse_format(to_string(*format).c_str(), &c) != FERRY_OK)
    throw UsageError(ferry_last_error());
  return c;
}

WaitRecord wait_of(const ferry_error_record& c) {
  return {.operation = static_cast<Operation>(c.wait.operation),
          .call = c.wait.call,
          .rank = c.wait.rank,
          .peer = c.wait.peer,
          .expected = c.wait.expected,
          .observed = c.wait.observed,
          .via = static_cast<int>(c.wait_via),
          .role = static_cast<WaitRole>(c.wait_role),
          .node = static_cast<int>(c.wait_node)};
}

ferry_combine_args arguments(const Outputs& outputs, const Plan& plan, const Result& result,
                             const CombineOptions& options, ferry_epilogue& epilogue) {
  auto args = sized<ferry_combine_args>();
  args.outputs = rows_of(const_cast<void*>(outputs.data), outputs);
  args.result = rows_of(result.data, result);
  args.plan = to_c(plan);
  args.row_weights = options.row_weights;
  args.topk_weights = options.topk_weights;
  args.topk_weighted = options.topk_weighted;
  args.row_values = options.row_values;
  args.route_values = options.route_values;
  args.call = to_c(options.call);
  args.reduction = options.reduction ? static_cast<std::int32_t>(*options.reduction) + 1 : 0;
  args.shared_outputs = options.shared_outputs;
  if (options.epilogue.empty()) return args;
  epilogue = {.size = sizeof epilogue,
              .residual = options.epilogue.residual,
              .stride = options.epilogue.stride,
              .scale = options.epilogue.scale};
  args.epilogue = &epilogue;
  return args;
}

class ExchangeInC : public ForeignExchange {
 public:
  ExchangeInC(const Rank& rank, const Config& config);

  DispatchResult dispatch(const Tokens& tokens, const Routes& routes, const float* weights,
                          const DispatchOptions& options) override {
    return dispatched(ferry_dispatch, arguments(tokens, routes, weights, options));
  }
  void dispatch_send(const Tokens& tokens, const Routes& routes, const float* weights,
                     const DispatchOptions& options) override {
    require(ferry_dispatch_send, arguments(tokens, routes, weights, options));
  }
  DispatchResult dispatch_receive(const CallOptions& call) override;
  void combine(const Outputs& outputs, const Plan& plan, const Result& result,
               const CombineOptions& options) override;
  void combine_send(const Outputs& outputs, const Plan& plan, const Result& result,
                    const CombineOptions& options) override;
  void combine_receive(const CallOptions& call) override;
  void route_values(const float* values, const Plan& plan, float* row_values,
                    const CallOptions& call) override;
  void return_values(const float* row_values, const Plan& plan, float* route_values,
                     const CallOptions& call) override;
  DispatchResult combine_backward(const Tokens& d_result, const Plan& plan, const float* topk_weights,
                                  const Outputs& outputs, float* d_weights,
                                  const DispatchOptions& options) override;
  void all_gather_v(const AllGather& given, const CallOptions& call) override;
  void reduce_scatter_v(const ReduceScatter& given, const CallOptions& call) override;
  DispatchCounts dispatch_counts(const Ids& ids, std::int64_t tokens, const CallOptions& call) override;
  const StepMetadata* metadata(std::int32_t count, const CallOptions& call, StepMetadata* into) override;

  void check(int lane) override;
  const DispatchResult& last_dispatch_result(int lane) override;
  LoadCounts load_counts() override;
  WireCounts wire_counts() override;

 private:
  static ferry_dispatch_args arguments(const Tokens& tokens, const Routes& routes, const float* weights,
                                       const DispatchOptions& options);

  // Calls the function; throws what its status means.
  template <class Function, class... Args>
  void require(Function function, const Args&... args) const {
    throw_unless_ok(function(handle_.get(), &args...));
  }
  // Calls a function whose arguments have a field for a result.
  template <class Function, class Args>
  DispatchResult dispatched(Function function, Args args) const {
    ferry_dispatch_result result{};
    result.size = sizeof result;
    args.result = &result;
    require(function, args);
    return to_cpp(result);
  }
  ferry_counts counts() const;
  static void throw_unless_ok(ferry_status status);
  static DispatchResult to_cpp(const ferry_dispatch_result& c);

  std::unique_ptr<ferry_exchange, void (*)(ferry_exchange*)> handle_;
  DispatchResult last_;
};

void ExchangeInC::throw_unless_ok(ferry_status status) {
  if (status == FERRY_OK) return;
  auto record = sized<ferry_error_record>();
  ferry_last_record(&record);
  const std::string text = ferry_last_error();
  switch (record.kind) {
    case FERRY_RECORD_BAD_ID:
      throw BadIdError(text, {record.bad_id.rank, record.bad_id.token, record.bad_id.slot, record.bad_id.id,
                              record.bad_id.count});
    case FERRY_RECORD_BAD_SOURCE:
      throw BadSourceError(text, {record.bad_source.rank, record.bad_source.index, record.bad_source.count});
    case FERRY_RECORD_OVERFLOW:
      throw OverflowError(text, {record.overflow.rank, record.overflow.capacity, record.overflow.needed,
                                 record.overflow.dropped});
  }
  if (status == FERRY_TIMEOUT) throw TimeoutError(text, wait_of(record));
  if (status == FERRY_PEER_LOST) throw PeerLostError(text, wait_of(record));
  if (status == FERRY_SYSTEM) throw SystemError(text, static_cast<int>(record.error_number));
  if (status == FERRY_UNSUPPORTED) throw UnsupportedError(text);
  if (status == FERRY_USAGE) throw UsageError(text);
  throw std::runtime_error(text);
}

ExchangeInC::ExchangeInC(const Rank& rank, const Config& config) : handle_(nullptr, ferry_exchange_destroy) {
  ferry_config c = capi::to_c(config);
  c.size = sizeof c;
  std::vector<std::int32_t> ranks, locals, held, counts;
  for (const ExpertLocation& location : config.placement.locations()) {
    ranks.push_back(location.rank);
    locals.push_back(location.local);
  }
  for (int r = 0; r < config.placement.ranks(); ++r) {
    const std::vector<int>& experts = config.placement.experts_of(r);
    held.insert(held.end(), experts.begin(), experts.end());
    counts.push_back(static_cast<std::int32_t>(experts.size()));
  }
  if (config.placement.has_replicas()) {
    c.held_experts = held.data();
    c.held_counts = counts.data();
  } else if (!ranks.empty()) {
    c.expert_rank = ranks.data();
    c.expert_local = locals.data();
  }
  const ferry_rank of_c{rank};
  ferry_exchange* made = nullptr;
  throw_unless_ok(ferry_exchange_create(&of_c, &c, &made));
  handle_.reset(made);
}

ferry_dispatch_args ExchangeInC::arguments(const Tokens& tokens, const Routes& routes, const float* weights,
                                           const DispatchOptions& options) {
  auto args = sized<ferry_dispatch_args>();
  args.tokens = to_c(tokens);
  args.ids = routes.ids.data;
  args.id_type = static_cast<std::int32_t>(routes.ids.type);
  args.plan = to_c(routes.plan);
  args.weights = weights;
  args.apply_weights = options.apply_weights;
  args.layer = options.layer;
  args.format = to_c(options.format);
  args.memory = to_c(options.memory);
  args.dot_rows = options.dot_rows;
  args.call = to_c(options.call);
  args.global_scale = options.global_scale;
  args.input_scales = options.input_scales.data();
  args.input_scale_count = static_cast<std::int64_t>(options.input_scales.size());
  args.weighted = options.weighted;
  return args;
}

DispatchResult ExchangeInC::to_cpp(const ferry_dispatch_result& c) {
  DispatchResult received;
  received.data = c.data;
  for (std::size_t p = 0; p < kMaxParts; ++p)
    received.parts[p] = {c.parts[p].data, c.parts[p].row_bytes, c.parts[p].leading_dimension};
  received.groups = static_cast<int>(c.groups);
  received.capacity = c.capacity;
  received.counts = c.counts;
  received.row_offsets = c.row_offsets;
  received.total = c.total;
  received.group_expert = c.group_expert;
  received.source = reinterpret_cast<const Source*>(c.source);
  received.weight = c.weight;
  received.local_ids = c.local_ids;
  received.group_of_row = c.group_of_row;
  received.dots = c.dots;
  received.tile_offsets = c.tile_offsets;
  received.index = c.index;
  received.slot = c.slot;
  received.block_group = c.block_group;
  received.source_offsets = c.source_offsets;
  received.row_total = c.row_total;
  received.row_capacity = c.row_capacity;
  received.host = reinterpret_cast<const HostTotals*>(c.host);
  received.call = c.call;
  received.plan = Plan::over(c.plan.storage, c.plan.bytes, c.plan.call);
  return received;
}

DispatchResult ExchangeInC::dispatch_receive(const CallOptions& call) {
  const ferry_call_options c = to_c(call);
  auto result = sized<ferry_dispatch_result>();
  throw_unless_ok(ferry_dispatch_receive(handle_.get(), &c, &result));
  return to_cpp(result);
}

void ExchangeInC::combine(const Outputs& outputs, const Plan& plan, const Result& result,
                          const CombineOptions& options) {
  ferry_epilogue epilogue{};
  require(ferry_combine, contract::arguments(outputs, plan, result, options, epilogue));
}

void ExchangeInC::combine_send(const Outputs& outputs, const Plan& plan, const Result& result,
                               const CombineOptions& options) {
  ferry_epilogue epilogue{};
  require(ferry_combine_send, contract::arguments(outputs, plan, result, options, epilogue));
}

void ExchangeInC::combine_receive(const CallOptions& call) {
  require(ferry_combine_receive, to_c(call));
}

void ExchangeInC::route_values(const float* values, const Plan& plan, float* row_values,
                               const CallOptions& call) {
  auto args = sized<ferry_route_values_args>();
  args.values = values;
  args.plan = to_c(plan);
  args.row_values = row_values;
  args.call = to_c(call);
  require(ferry_route_values, args);
}

void ExchangeInC::return_values(const float* row_values, const Plan& plan, float* route_values,
                                const CallOptions& call) {
  auto args = sized<ferry_return_values_args>();
  args.plan = to_c(plan);
  args.row_values = row_values;
  args.route_values = route_values;
  args.call = to_c(call);
  require(ferry_return_values, args);
}

DispatchResult ExchangeInC::combine_backward(const Tokens& d_result, const Plan& plan,
                                             const float* topk_weights, const Outputs& outputs,
                                             float* d_weights, const DispatchOptions& options) {
  auto args = sized<ferry_combine_backward_args>();
  args.d_result = to_c(d_result);
  args.plan = to_c(plan);
  args.topk_weights = topk_weights;
  args.outputs = outputs.data;
  args.output_rows = outputs.rows;
  args.d_weights = d_weights;
  args.format = to_c(options.format);
  args.memory = to_c(options.memory);
  args.call = to_c(options.call);
  return dispatched(ferry_combine_backward, args);
}

void ExchangeInC::all_gather_v(const AllGather& given, const CallOptions& call) {
  auto args = sized<ferry_all_gather_v_args>();
  args.call = to_c(call);
  args.rows = given.rows;
  args.count = given.count;
  args.row_bytes = given.row_bytes;
  args.gathered = given.gathered;
  args.capacity = given.capacity;
  require(ferry_all_gather_v, args);
}

void ExchangeInC::reduce_scatter_v(const ReduceScatter& given, const CallOptions& call) {
  auto args = sized<ferry_reduce_scatter_v_args>();
  args.call = to_c(call);
  args.rows = given.rows;
  args.total = given.total;
  args.type = static_cast<std::int32_t>(given.type);
  args.sums = given.sums;
  args.count = given.count;
  require(ferry_reduce_scatter_v, args);
}

DispatchCounts ExchangeInC::dispatch_counts(const Ids& ids, std::int64_t tokens, const CallOptions& call) {
  auto counts = sized<ferry_dispatch_counts_result>();
  auto args = sized<ferry_dispatch_counts_args>();
  args.ids = ids.data;
  args.id_type = static_cast<std::int32_t>(ids.type);
  args.tokens = tokens;
  args.call = to_c(call);
  args.result = &counts;
  require(ferry_dispatch_counts, args);
  return {counts.total,
          {counts.routes, static_cast<std::size_t>(counts.local_experts)},
          {counts.tokens, static_cast<std::size_t>(counts.ranks)}};
}

const StepMetadata* ExchangeInC::metadata(std::int32_t count, const CallOptions& call, StepMetadata* into) {
  const ferry_step_metadata* metadata = nullptr;
  auto args = sized<ferry_metadata_args>();
  args.count = count;
  args.call = to_c(call);
  args.metadata = &metadata;
  args.into = reinterpret_cast<ferry_step_metadata*>(into);
  require(ferry_metadata, args);
  return reinterpret_cast<const StepMetadata*>(metadata);
}

void ExchangeInC::check(int lane) {
  throw_unless_ok(ferry_check(handle_.get(), lane));
}

const DispatchResult& ExchangeInC::last_dispatch_result(int lane) {
  auto result = sized<ferry_dispatch_result>();
  throw_unless_ok(ferry_last_dispatch_result(handle_.get(), lane, &result));
  return last_ = to_cpp(result);
}

ferry_counts ExchangeInC::counts() const {
  auto c = sized<ferry_counts>();
  throw_unless_ok(ferry_exchange_counts(handle_.get(), &c));
  return c;
}

LoadCounts ExchangeInC::load_counts() {
  const ferry_counts c = counts();
  const Exchange& exchange = handle_->exchange;
  const Config& config = exchange.config();
  return {{c.experts, c.experts + config.experts},
          {c.layers, c.layers + std::int64_t{config.layers} * config.experts},
          {c.ranks, c.ranks + exchange.rank().size()},
          c.dispatches};
}

WireCounts ExchangeInC::wire_counts() {
  const ferry_counts c = counts();
  return {c.dispatch_bytes,
          c.dispatch_messages,
          c.combine_bytes,
          c.combine_messages,
          {c.dispatch_bytes_between_nodes, c.dispatch_messages_between_nodes, c.combine_bytes_between_nodes,
           c.combine_messages_between_nodes}};
}

}  // namespace

const Language kC{"C", [](const Rank& rank, const Config& config) -> std::unique_ptr<ForeignExchange> {
                    return std::make_unique<ExchangeInC>(rank, config);
                  }};

}  // namespace ferry::contract
