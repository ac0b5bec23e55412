// What an exchange holds, and the steps that its calls share.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "base/errors.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "exchange/backend.hpp"
#include "exchange/checks.hpp"
#include "exchange/encoder_staging.hpp"
#include "exchange/overlap.hpp"
#include "group/rank_state.hpp"
#include "layout/plan_layout.hpp"

namespace ferry {

// The receive phase that a lane of the split form still expects.
enum class PendingReceive { none, dispatch, combine };

struct ExchangeLane {
  PendingReceive pending = PendingReceive::none;
  DispatchResult last_result;
  // In memory of the lane, which the next such call overwrites.
  DispatchCounts last_counts;
  const void* last_joined = nullptr;
};

// A call's path: dispatch_call() collects the arguments, check_dispatch_call() checks them on this rank or
// refuses the call, the backend carries it out, and check_after_call() raises what the call has found.
struct Exchange::State {
  Rank rank;
  Config config;
  std::unique_ptr<Backend> backend;
  std::vector<ExchangeLane> lanes;
  std::unique_ptr<EncoderStaging> encoded;  // of a registered format; else null

  PlanIn plan_in() const { return backend->capabilities().device_memory ? PlanIn::device : PlanIn::host; }

  ExchangeLane& lane(int index) {
    rank.state().require_own_process("exchange");
    if (index < 0 || index >= config.lanes) {
      throw UsageError(
          str("lane ", index, " does not exist: the exchange has ", counted(config.lanes, "lane")));
    }
    return lanes[static_cast<std::size_t>(index)];
  }

  ExchangeLane& idle_lane(int index) {
    ExchangeLane& lane = this->lane(index);
    if (lane.pending != PendingReceive::none) {
      throw UsageError(str("lane ", index, ": a ",
                           lane.pending == PendingReceive::dispatch ? "dispatch" : "combine",
                           " has been sent and not received: call its receive phase first"));
    }
    return lane;
  }

  // Runs this rank's checks of a call. If they throw, refuses the call, so that the peers' call ends with the
  // same error.
  template <class Check>
  void check_or_refuse(Operation operation, const CallOptions& call, Check check) {
    or_refuse([&](const Error& error) { backend->refuse(operation, error, call); }, check);
  }

  // Runs a step of combine_backward's dispatch. Where errors are late the peers have already enqueued the
  // return_values that follows it when this rank throws, so that is refused as well.
  template <class Step>
  auto refusing_return_too(const CallOptions& call, Step step) {
    return or_refuse(
        [&](const Error& error) {
          if (backend->capabilities().late_errors) backend->refuse(Operation::return_values, error, call);
        },
        step);
  }

  // Runs a call of the backend. If it ends with an error, its diagnostics are dropped, so that the next call
  // does not raise them. Device backends keep theirs, which are of earlier calls as well.
  template <class Call>
  auto dropping_diagnostics_on_error(int lane, Call call) {
    try {
      return call();
    } catch (const Error&) {
      if (plan_in() == PlanIn::host) backend->take_diagnostics(lane);
      throw;
    }
  }

  void check_after_call(int lane) {
    if (config.check_calls && plan_in() == PlanIn::host) raise(backend->take_diagnostics(lane), config);
  }

  DispatchCall dispatch_call(const Tokens& tokens, const Ids& ids, const Plan& plan, const float* weights,
                             const DispatchOptions& options) const {
    return {.options = options.call,
            .tokens = tokens,
            .ids = ids,
            .plan = plan,
            .weights = weights,
            .weighted = options.weighted || options.apply_weights || weights != nullptr,
            .format = options.format.value_or(config.format),
            .memory = options.memory,
            .apply_weights = options.apply_weights,
            .dot_rows = options.dot_rows,
            .global_scale = options.global_scale,
            .input_scales = options.input_scales,
            .layer = options.layer};
  }

  // `plan` has been checked.
  KnownRows known_rows(const Plan& plan) const {
    if (plan.empty() || plan_in() == PlanIn::device) return {};
    const PlanHeader& header = *static_cast<const PlanHeader*>(plan.storage());
    return {.tokens = header.tokens, .total = header.magic == kFewerRowsMagic ? kUnknownRows : header.total};
  }

  void check_dispatch_call(const DispatchCall& call) {
    idle_lane(call.options.lane);
    check_or_refuse(Operation::dispatch, call.options, [&] {
      check_dispatch(config, rank.index(), call, plan_in());
      arrays_of(config, rank.index(), call, backend->own_arrays(call.options.lane), known_rows(call.plan))
          .require_apart(call.backward ? "combine_backward: " : "dispatch: ", rank.index());
    });
  }

  // With a registered format, encodes the tokens of a checked call. The backend sees raw parts.
  DispatchCall encoded_call(const DispatchCall& call) {
    if (encoded == nullptr || call.format != config.format) return call;
    DispatchCall raw;
    check_or_refuse(Operation::dispatch, call.options, [&] { raw = encoded->encode(call); });
    return raw;
  }

  DispatchResult dispatch(const DispatchCall& call) {
    DispatchResult received = dispatch_without_check_after(call, false);
    check_after_call(call.options.lane);
    return received;
  }

  DispatchResult dispatch_without_check_after(const DispatchCall& given, bool split) {
    check_dispatch_call(given);
    const DispatchCall call = encoded_call(given);
    ExchangeLane& lane = this->lane(call.options.lane);
    lane.last_result = {};
    lane.last_result =
        dropping_diagnostics_on_error(call.options.lane, [&] { return backend->dispatch(call, split); });
    return lane.last_result;
  }

  void dispatch_send(const DispatchCall& call) {
    dispatch_without_check_after(call, true);
    ExchangeLane& lane = this->lane(call.options.lane);
    lane.last_result = {};
    lane.pending = PendingReceive::dispatch;
  }

  CombineCall checked_combine_call(const Outputs& outputs, const Plan& plan, const Result& result,
                                   const CombineOptions& options, bool split) {
    idle_lane(options.call.lane);
    CombineCall call{.options = options.call,
                     .outputs = outputs,
                     .plan = plan,
                     .result = result,
                     .row_weights = options.row_weights,
                     .topk_weights = options.topk_weights,
                     .topk_weighted = options.topk_weighted || options.topk_weights != nullptr,
                     .reduction = options.reduction.value_or(config.reduction),
                     .row_values = options.row_values,
                     .route_values = options.route_values,
                     .shared_outputs = options.shared_outputs,
                     .epilogue = options.epilogue};
    check_or_refuse(Operation::combine, call.options, [&] {
      check_combine(config, rank.index(), call, split, plan_in());
      arrays_of(config, call, known_rows(call.plan)).require_apart("combine: ", rank.index());
    });
    return call;
  }

  void send_values(const RouteValuesCall& call) {
    idle_lane(call.options.lane);
    check_or_refuse(call.operation, call.options, [&] {
      check_route_values(config, rank.index(), call, plan_in());
      arrays_of(config, call, known_rows(call.plan))
          .require_apart(str(to_string(call.operation), ": ").c_str(), rank.index());
    });
    dropping_diagnostics_on_error(call.options.lane, [&] { backend->run(call); });
    check_after_call(call.options.lane);
  }

  template <JoinsNumbers Call>
  const typename Call::Result* join_numbers(const Call& call) {
    const char* const name = to_string(Call::operation);
    const ProfilerRange range(name);
    const void*& own = idle_lane(call.options.lane).last_joined;
    const bool on_host = plan_in() == PlanIn::host;
    check_or_refuse(Call::operation, call.options, [&] {
      const Count& count = call.number;
      if (!count.on_device)
        return check_number(Call::operation, rank.index(), count.value, Call::most(rank.size()));
      if (count.device == nullptr) throw UsageError(str(name, ": the address of the count is null"));
      if (on_host) {
        throw UnsupportedError(
            str(name, ": this backend cannot read a count from device memory: pass the count itself"));
      }
      CallArrays arrays;
      arrays.read("device_count", count.device, 1, sizeof *count.device);
      arrays.write("into", call.into, 1, sizeof(typename Call::Result));
      if (call.into == nullptr) arrays.write_own("the lane's result", own, sizeof(typename Call::Result));
      arrays.require_apart(str(name, ": ").c_str(), rank.index());
    });
    const void* const joined = backend->run(call).joined;
    if (call.into == nullptr) own = joined;
    return static_cast<const typename Call::Result*>(joined);
  }

  // all_gather_v or reduce_scatter_v: gather.cpp.
  std::int64_t gather(GatherCall call);
};

// For the evaluator of programs, and for src/max.
class ExchangeAccess {
 public:
  static SourceOperations* source_operations(const Exchange& exchange) {
    return exchange.state_->backend->source_operations();
  }
  static const Backend& backend_of(const Exchange& exchange) { return *exchange.state_->backend; }
};

}  // namespace ferry
