#include "ferry/exchange.hpp"

#include <iterator>
#include <vector>

#include "base/log.hpp"
#include "base/text.hpp"
#include "exchange/checks.hpp"
#include "exchange/configuration.hpp"
#include "exchange/device_work.hpp"
#include "exchange/exchange_state.hpp"
#include "exchange/source_operations.hpp"
#include "format/encoding.hpp"
#include "group/agreement.hpp"

namespace ferry {

Exchange::Exchange(Rank rank, const Config& config) {
  Config agreed = agree_on_config(rank, config);
  auto backend = make_backend(rank, agreed);
  const auto lanes = static_cast<std::size_t>(agreed.lanes);
  state_.reset(new State{std::move(rank), std::move(agreed), std::move(backend),
                         std::vector<ExchangeLane>(lanes), nullptr});
  if (encoding_of(state_->config.format).by_caller) {
    // On all ranks before any calls: device memory may not be allocated while a kernel of a peer waits.
    run_on_all_ranks(state_->rank, [&] {
      state_->encoded = std::make_unique<EncoderStaging>(state_->config, state_->backend->make_device_work());
    });
  }
  if (!log_enabled()) return;
  const Config& made = state_->config;
  log_line(str("rank ", state_->rank.index(), " of ", state_->rank.size(), " has made an exchange: backend ",
               to_string(made.backend), ", experts ", made.experts, ", top_k ", made.top_k, ", hidden ",
               made.hidden, ", max_tokens ", made.max_tokens, ", ", to_string(made.layout), ", capacity ",
               capacity(), ", ", to_string(made.format), ", lanes ", made.lanes, ", ",
               counted(sizes().total(), "byte")));
}

// A process forked from the rank's leaves the exchange to it.
Exchange::~Exchange() {
  if (!state_->rank.state().in_own_process())
    state_.release();  // NOLINT(bugprone-unused-return-value): the process does not own what it holds
}

const Config& Exchange::config() const {
  return state_->config;
}
const Rank& Exchange::rank() const {
  return state_->rank;
}
Sizes Exchange::sizes() const {
  Sizes sizes = state_->backend->sizes();
  sizes.plans += EncoderStaging::bytes(state_->config);
  return sizes;
}
std::int64_t Exchange::capacity() const {
  return group_capacity(state_->config, state_->rank.index());
}

DispatchResult Exchange::dispatch(const Tokens& tokens, const Ids& ids, const float* weights,
                                  const DispatchOptions& options) {
  const ProfilerRange range("dispatch");
  return state_->dispatch(state_->dispatch_call(tokens, ids, {}, weights, options));
}

DispatchResult Exchange::dispatch(const Tokens& tokens, const Plan& plan, const float* weights,
                                  const DispatchOptions& options) {
  const ProfilerRange range("dispatch");
  return state_->dispatch(state_->dispatch_call(tokens, {}, plan, weights, options));
}

void Exchange::dispatch_send(const Tokens& tokens, const Ids& ids, const float* weights,
                             const DispatchOptions& options) {
  const ProfilerRange range("dispatch_send");
  state_->dispatch_send(state_->dispatch_call(tokens, ids, {}, weights, options));
}

void Exchange::dispatch_send(const Tokens& tokens, const Plan& plan, const float* weights,
                             const DispatchOptions& options) {
  const ProfilerRange range("dispatch_send");
  state_->dispatch_send(state_->dispatch_call(tokens, {}, plan, weights, options));
}

DispatchResult Exchange::dispatch_receive(const CallOptions& call) {
  const ProfilerRange range("dispatch_receive");
  ExchangeLane& lane = state_->lane(call.lane);
  if (lane.pending != PendingReceive::dispatch)
    throw UsageError(str("lane ", call.lane, ": no dispatch has been sent: call dispatch_send first"));
  lane.pending = PendingReceive::none;
  lane.last_result = state_->dropping_diagnostics_on_error(
      call.lane, [&] { return state_->backend->dispatch_receive(call); });
  state_->check_after_call(call.lane);
  return lane.last_result;
}

void Exchange::combine(const Outputs& outputs, const Plan& plan, const Result& result,
                       const CombineOptions& options) {
  const ProfilerRange range("combine");
  const CombineCall call = state_->checked_combine_call(outputs, plan, result, options, false);
  state_->dropping_diagnostics_on_error(call.options.lane, [&] { state_->backend->combine(call, false); });
  state_->check_after_call(call.options.lane);
}

void Exchange::combine_send(const Outputs& outputs, const Plan& plan, const Result& result,
                            const CombineOptions& options) {
  const ProfilerRange range("combine_send");
  const CombineCall call = state_->checked_combine_call(outputs, plan, result, options, true);
  state_->dropping_diagnostics_on_error(call.options.lane, [&] { state_->backend->combine(call, true); });
  state_->lane(call.options.lane).pending = PendingReceive::combine;
}

void Exchange::combine_receive(const CallOptions& call) {
  const ProfilerRange range("combine_receive");
  ExchangeLane& lane = state_->lane(call.lane);
  if (lane.pending != PendingReceive::combine)
    throw UsageError(str("lane ", call.lane, ": no combine has been sent: call combine_send first"));
  lane.pending = PendingReceive::none;
  state_->dropping_diagnostics_on_error(call.lane, [&] { state_->backend->combine_receive(call); });
  state_->check_after_call(call.lane);
}

void Exchange::route_values(const float* values, const Plan& plan, float* row_values,
                            const CallOptions& call) {
  const ProfilerRange range("route_values");
  state_->send_values({.options = call, .from = values, .plan = plan, .to = row_values});
}

void Exchange::return_values(const float* row_values, const Plan& plan, float* route_values,
                             const CallOptions& call) {
  const ProfilerRange range("return_values");
  state_->send_values({.operation = Operation::return_values,
                       .options = call,
                       .from = row_values,
                       .plan = plan,
                       .to = route_values});
}

DispatchResult Exchange::combine_backward(const Tokens& d_result, const Plan& plan, const float* topk_weights,
                                          const Outputs& outputs, float* d_weights,
                                          const DispatchOptions& options) {
  const ProfilerRange range("combine_backward");
  const Config& config = state_->config;
  state_->idle_lane(options.call.lane);
  const auto refusing_both = [&](auto step) { return state_->refusing_return_too(options.call, step); };
  refusing_both([&] {
    state_->check_or_refuse(Operation::dispatch, options.call, [&] {
      if (options.apply_weights || options.dot_rows != nullptr) {
        throw UsageError(str("combine_backward: ", options.apply_weights ? "apply_weights" : "dot_rows",
                             " on rank ", state_->rank.index(),
                             ": the call multiplies the rows by topk_weights and takes the dots with outputs "
                             "itself: leave both options unset"));
      }
      const std::int64_t dense = config.hidden * bytes_of(config.combine_type);
      if (outputs.type != config.combine_type || (outputs.stride != 0 && outputs.stride != dense)) {
        throw UsageError(str("combine_backward: outputs must be dense rows of ",
                             to_string(config.combine_type), ", ", counted(dense, "byte"), " each; rank ",
                             state_->rank.index(), " gives ", to_string(outputs.type),
                             ", stride = ", outputs.stride));
      }
    });
  });
  DispatchOptions dispatch_options = options;
  dispatch_options.apply_weights = true;
  dispatch_options.dot_rows = outputs.data;
  DispatchCall call = state_->dispatch_call(d_result, {}, plan, topk_weights, dispatch_options);
  call.backward = true;
  call.output_rows = outputs.rows;
  call.d_weights = d_weights;
  // The dispatch's diagnostics are raised by return_values: the peers carry out both steps, so this rank must
  // too.
  DispatchResult rows = refusing_both([&] { return state_->dispatch_without_check_after(call, false); });
  return_values(rows.dots, rows.plan, d_weights, options.call);
  return rows;
}

DispatchCounts Exchange::dispatch_counts(const Ids& ids, std::int64_t tokens, const CallOptions& call) {
  const ProfilerRange range("dispatch_counts");
  DispatchCounts& counts = state_->idle_lane(call.lane).last_counts;
  state_->check_or_refuse(Operation::dispatch_counts, call, [&] {
    const int me = state_->rank.index();
    check_ids(state_->config, me, "dispatch_counts", ids, tokens);
    CallArrays arrays;
    arrays.read("ids", ids.data, tokens, state_->config.top_k * bytes_of(ids.type));
    arrays.write_own("the lane's routes", counts.routes.data(), std::ssize(counts.routes) * 4);
    arrays.write_own("the lane's tokens", counts.tokens.data(), std::ssize(counts.tokens) * 4);
    arrays.require_apart("dispatch_counts: ", me);
  });
  counts =
      state_->backend
          ->run(DispatchCountsCall{.options = call, .ids = ids, .tokens = static_cast<std::int32_t>(tokens)})
          .counts;
  return counts;
}

const StepMetadata* Exchange::metadata(const Count& count, const CallOptions& call, StepMetadata* into) {
  return state_->join_numbers(MetadataCall{{.options = call, .number = count, .into = into}});
}

void Exchange::refuse(Operation operation, const Error& error, const CallOptions& call) noexcept {
  if (call.lane < 0 || call.lane >= state_->config.lanes || !state_->rank.state().in_own_process()) return;
  if (state_->lanes[static_cast<std::size_t>(call.lane)].pending != PendingReceive::none) return;
  state_->backend->refuse(operation, error, call);
}

void Exchange::check(int lane) {
  state_->lane(lane);
  state_->backend->raise_device_error(lane);
  if (state_->encoded != nullptr) state_->encoded->raise_broken_guards(lane);
  raise(state_->backend->take_diagnostics(lane), state_->config);
}

void Exchange::synchronize(const CallOptions& call) {
  state_->lane(call.lane);
  state_->backend->synchronize(call);
}

std::unique_ptr<DeviceWork> Backend::make_device_work() const {
  return nullptr;
}

SourceOperations* source_operations(const Exchange& exchange) {
  return ExchangeAccess::source_operations(exchange);
}

std::uint64_t next_call(const Exchange& exchange, int lane) {
  return ExchangeAccess::backend_of(exchange).last_call(lane) + 1;
}

std::unique_ptr<DeviceWork> make_device_work(const Exchange& exchange) {
  return ExchangeAccess::backend_of(exchange).make_device_work();
}

bool can_be_captured(const Exchange& exchange) {
  return ExchangeAccess::backend_of(exchange).capabilities().capture;
}

const DispatchResult& Exchange::last_dispatch_result(int lane) const {
  return state_->lane(lane).last_result;
}
LoadCounts Exchange::load_counts() const {
  return state_->backend->load_counts();
}
WireCounts Exchange::wire_counts() const {
  return state_->backend->wire_counts();
}
WaitTimes Exchange::wait_times() const {
  const std::vector<std::int64_t> none(static_cast<std::size_t>(state_->rank.size()), 0);
  WaitTimes sum{.dispatch = none, .combine = none};
  state_->backend->add_waits(sum);
  return sum;
}

}  // namespace ferry
