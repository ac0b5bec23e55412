#include "ferry/exchange.hpp"

#include <limits>
#include <vector>

#include "base/text.hpp"
#include "exchange/backend.hpp"
#include "exchange/checks.hpp"
#include "exchange/configuration.hpp"

namespace ferry {
// What a lane of the split form is in the middle of.
enum class Half { none, dispatch, combine };

struct LaneState {
  Half half = Half::none;
  DispatchResult received;
};

namespace {

std::string describe(const CallDiagnostics& findings) {
  std::string text;
  auto add = [&](const std::string& part) { text += text.empty() ? part : "; " + part; };
  if (const Overflow& o = findings.overflow; o.dropped > 0) {
    add(str("capacity of ", o.capacity, " rows exceeded: rank ", o.rank, " needs ", o.needed, ", ", o.dropped,
            " routes or rows were dropped on all ranks"));
  }
  if (const BadId& b = findings.bad_id; b.count > 0) {
    add(str(b.count, " expert ids out of range, the first on rank ", b.rank, ", token ", b.token, ", slot ",
            b.slot, ": id ", b.id, "; they were skipped"));
  }
  if (const BadSource& b = findings.bad_source; b.count > 0) {
    add(str(b.count, " entries of the plan point outside the exchange on rank ", b.rank,
            ", the first at index ", b.index, "; they were skipped"));
  }
  return text;
}

void raise(const CallDiagnostics& findings) {
  if (findings.overflow.dropped > 0) throw OverflowError(describe(findings), findings.overflow);
  if (findings.bad_id.count > 0) throw BadIdError(describe(findings), findings.bad_id);
  if (findings.bad_source.count > 0) throw BadSourceError(describe(findings), findings.bad_source);
}

}  // namespace

struct Exchange::State {
  Rank rank;
  Config config;
  std::unique_ptr<Backend> backend;
  std::vector<LaneState> lanes;

  LaneState& lane(int index) {
    if (index < 0 || index >= config.lanes) {
      throw UsageError(str("lane ", index, " of an exchange with ", config.lanes, " lanes"));
    }
    return lanes[static_cast<std::size_t>(index)];
  }

  LaneState& idle_lane(int index) {
    LaneState& lane = this->lane(index);
    if (lane.half != Half::none) {
      throw UsageError(str("lane ", index, ": a ", lane.half == Half::dispatch ? "dispatch" : "combine",
                           " has been sent and not received"));
    }
    return lane;
  }

  // Runs this rank's checks of a call; if they throw, the peers' call ends with the same error.
  template <class Check>
  void check_or_refuse(Operation operation, int lane, Stream stream, Check check) {
    try {
      check();
    } catch (const Error& error) {
      backend->refuse(operation, lane, error, stream);
      throw;
    }
  }

  // The first of an operation's two calls. On device backends the peers have put both on their streams when
  // this rank refuses the first, so that it refuses the second as well.
  template <class Step>
  auto refusing_combine_too(int lane, Stream stream, Step step) {
    try {
      return step();
    } catch (const Error& error) {
      if (plan_in() == PlanIn::device) backend->refuse(Operation::combine, lane, error, stream);
      throw;
    }
  }

  PlanIn plan_in() const { return backend->capabilities().device_memory ? PlanIn::device : PlanIn::host; }

  void finish(int lane) {
    if (config.check_calls && plan_in() == PlanIn::host) raise(backend->take_diagnostics(lane));
  }

  DispatchCall dispatch_call(const Tokens& tokens, const float* weights,
                             const DispatchOptions& options) const {
    return {.lane = options.lane,
            .tokens = tokens,
            .weights = weights,
            .format = options.format.value_or(config.format),
            .memory = options.memory,
            .apply_weights = options.apply_weights,
            .dot_rows = options.dot_rows,
            .sm_limit = options.sm_limit};
  }

  void begin(const DispatchCall& call, Stream stream) {
    idle_lane(call.lane);
    check_or_refuse(Operation::dispatch, call.lane, stream,
                    [&] { check_dispatch(config, rank.index(), call, plan_in()); });
  }

  CombineCall begin_combine(const Outputs& outputs, const Plan& plan, const Result& result,
                            const CombineOptions& options, bool split, Stream stream) {
    idle_lane(options.lane);
    CombineCall call{.lane = options.lane,
                     .outputs = outputs,
                     .plan = plan,
                     .result = result,
                     .row_weights = options.row_weights,
                     .topk_weights = options.topk_weights,
                     .reduction = options.reduction.value_or(config.reduction),
                     .row_values = options.row_values,
                     .route_values = options.route_values,
                     .sm_limit = options.sm_limit};
    check_or_refuse(Operation::combine, call.lane, stream,
                    [&] { check_combine(config, rank.index(), call, split, plan_in()); });
    return call;
  }

  // What a call found that a peer has ended is nothing the next call should be blamed for. On a device the
  // findings are of earlier calls as well.
  template <class Call>
  auto forgetting_on_error(int lane, Call call) {
    try {
      return call();
    } catch (const Error&) {
      if (plan_in() == PlanIn::host) backend->take_diagnostics(lane);
      throw;
    }
  }

  // Without the check at its end.
  DispatchResult carry(const DispatchCall& call, Stream stream) {
    begin(call, stream);
    LaneState& lane = this->lane(call.lane);
    lane.received = {};
    lane.received = forgetting_on_error(call.lane, [&] { return backend->dispatch(call, stream); });
    return lane.received;
  }

  DispatchResult dispatch(const DispatchCall& call, Stream stream) {
    DispatchResult received = carry(call, stream);
    finish(call.lane);
    return received;
  }

  void dispatch_send(const DispatchCall& call, Stream stream) {
    begin(call, stream);
    LaneState& lane = this->lane(call.lane);
    lane.received = {};
    forgetting_on_error(call.lane, [&] { backend->dispatch_send(call, stream); });
    lane.half = Half::dispatch;
  }
};

Exchange::Exchange(Rank rank, const Config& config) {
  Config agreed = agree_on_config(rank, config);
  auto backend = make_backend(rank, agreed);
  const auto lanes = static_cast<std::size_t>(agreed.lanes);
  state_.reset(
      new State{std::move(rank), std::move(agreed), std::move(backend), std::vector<LaneState>(lanes)});
}

Exchange::~Exchange() = default;

const Config& Exchange::config() const {
  return state_->config;
}
const Rank& Exchange::rank() const {
  return state_->rank;
}
Sizes Exchange::sizes() const {
  return state_->backend->sizes();
}
std::int64_t Exchange::capacity() const {
  return group_capacity(state_->config, state_->rank.index());
}

DispatchResult Exchange::dispatch(const Tokens& tokens, const Ids& ids, const float* weights,
                                  const DispatchOptions& options, Stream stream) {
  DispatchCall call = state_->dispatch_call(tokens, weights, options);
  call.ids = ids;
  return state_->dispatch(call, stream);
}

DispatchResult Exchange::dispatch(const Tokens& tokens, const Plan& plan, const float* weights,
                                  const DispatchOptions& options, Stream stream) {
  DispatchCall call = state_->dispatch_call(tokens, weights, options);
  call.plan = plan;
  return state_->dispatch(call, stream);
}

void Exchange::dispatch_send(const Tokens& tokens, const Ids& ids, const float* weights,
                             const DispatchOptions& options, Stream stream) {
  DispatchCall call = state_->dispatch_call(tokens, weights, options);
  call.ids = ids;
  state_->dispatch_send(call, stream);
}

void Exchange::dispatch_send(const Tokens& tokens, const Plan& plan, const float* weights,
                             const DispatchOptions& options, Stream stream) {
  DispatchCall call = state_->dispatch_call(tokens, weights, options);
  call.plan = plan;
  state_->dispatch_send(call, stream);
}

DispatchResult Exchange::dispatch_receive(int lane_index, Stream stream) {
  LaneState& lane = state_->lane(lane_index);
  if (lane.half != Half::dispatch) throw UsageError(str("lane ", lane_index, ": no dispatch has been sent"));
  lane.half = Half::none;
  lane.received = state_->forgetting_on_error(
      lane_index, [&] { return state_->backend->dispatch_receive(lane_index, stream); });
  state_->finish(lane_index);
  return lane.received;
}

void Exchange::combine(const Outputs& outputs, const Plan& plan, const Result& result,
                       const CombineOptions& options, Stream stream) {
  const CombineCall call = state_->begin_combine(outputs, plan, result, options, false, stream);
  state_->forgetting_on_error(call.lane, [&] { state_->backend->combine(call, stream); });
  state_->finish(options.lane);
}

void Exchange::combine_send(const Outputs& outputs, const Plan& plan, const Result& result,
                            const CombineOptions& options, Stream stream) {
  const CombineCall call = state_->begin_combine(outputs, plan, result, options, true, stream);
  state_->forgetting_on_error(call.lane, [&] { state_->backend->combine_send(call, stream); });
  state_->lane(options.lane).half = Half::combine;
}

void Exchange::combine_receive(int lane_index, Stream stream) {
  LaneState& lane = state_->lane(lane_index);
  if (lane.half != Half::combine) throw UsageError(str("lane ", lane_index, ": no combine has been sent"));
  lane.half = Half::none;
  state_->forgetting_on_error(lane_index, [&] { state_->backend->combine_receive(lane_index, stream); });
  state_->finish(lane_index);
}

void Exchange::route_values(const float* values, const Plan& plan, float* row_values, int lane,
                            Stream stream) {
  state_->idle_lane(lane);
  state_->check_or_refuse(Operation::route_values, lane, stream, [&] {
    check_plan(state_->config, state_->rank.index(), plan, state_->plan_in());
    if (state_->config.layout == Layout::rank_major) {
      throw UsageError("route_values: a rank_major row stands for several routes");
    }
    if (state_->plan_in() == PlanIn::device) return;
    const int me = state_->rank.index();
    if (values == nullptr && plan.tokens() > 0) {
      throw UsageError(str("route_values: no values given for the ", plan.tokens(), " tokens of rank ", me));
    }
    if (row_values == nullptr && plan.total() > 0) {
      throw UsageError(
          str("route_values: no memory for the values of the ", plan.total(), " rows of rank ", me));
    }
  });
  state_->forgetting_on_error(lane,
                              [&] { state_->backend->route_values(values, plan, row_values, lane, stream); });
  state_->finish(lane);
}

DispatchResult Exchange::combine_backward(const Tokens& d_result, const Plan& plan, const float* topk_weights,
                                          const Outputs& outputs, float* d_weights,
                                          const DispatchOptions& options, Stream stream) {
  const Config& config = state_->config;
  state_->idle_lane(options.lane);
  const auto refusing_both = [&](auto step) {
    return state_->refusing_combine_too(options.lane, stream, step);
  };
  refusing_both([&] {
    state_->check_or_refuse(Operation::dispatch, options.lane, stream, [&] {
      const std::int64_t dense = config.hidden * bytes_of(config.combine_type);
      if (outputs.type != config.combine_type || (outputs.stride != 0 && outputs.stride != dense)) {
        throw UsageError(str("combine_backward: outputs must be dense rows of ",
                             to_string(config.combine_type), ", ", dense, " bytes each; rank ",
                             state_->rank.index(), " gives ", to_string(outputs.type),
                             ", stride = ", outputs.stride));
      }
    });
  });
  DispatchOptions weighed = options;
  weighed.apply_weights = true;
  weighed.dot_rows = outputs.data;
  DispatchCall call = state_->dispatch_call(d_result, topk_weights, weighed);
  call.plan = plan;
  // What only this rank finds is raised after both steps: the peers take both.
  DispatchResult rows = refusing_both([&] { return state_->carry(call, stream); });
  combine({}, rows.plan, {}, {.row_values = rows.dots, .route_values = d_weights, .lane = options.lane},
          stream);
  return rows;
}

const StepMetadata* Exchange::metadata(std::int32_t count, int lane, Stream stream) {
  state_->idle_lane(lane);
  state_->check_or_refuse(Operation::metadata, lane, stream, [&] {
    const int ranks = state_->rank.size();
    if (count > std::numeric_limits<std::int32_t>::max() / ranks) {
      throw UsageError(str("metadata: a count of ", count, " on rank ", state_->rank.index(), ", the sum of ",
                           ranks, " ranks would not fit 32 bits"));
    }
    if (count < 0) throw UsageError(str("metadata: a count of ", count, " on rank ", state_->rank.index()));
  });
  return state_->backend->metadata(count, lane, stream);
}

const StepMetadata* Exchange::metadata(const std::int32_t* device_count, int lane, Stream stream) {
  state_->idle_lane(lane);
  state_->check_or_refuse(Operation::metadata, lane, stream, [&] {
    if (device_count == nullptr) throw UsageError("metadata: no count given");
  });
  return state_->backend->metadata_from_device(device_count, lane, stream);
}

void Exchange::refuse(Operation operation, int lane, const Error& error, Stream stream) noexcept {
  if (lane < 0 || lane >= state_->config.lanes) return;
  if (state_->lanes[static_cast<std::size_t>(lane)].half != Half::none) return;
  state_->backend->refuse(operation, lane, error, stream);
}

void Exchange::check(int lane) {
  state_->lane(lane);
  state_->backend->raise_device_error(lane);
  raise(state_->backend->take_diagnostics(lane));
}

void Exchange::synchronize(int lane, Stream stream) {
  state_->lane(lane);
  state_->backend->synchronize(lane, stream);
}

const DispatchResult& Exchange::last_dispatch_result(int lane) const {
  return state_->lane(lane).received;
}
LoadCounts Exchange::load() const {
  return state_->backend->load();
}
WireCounts Exchange::wire_counts() const {
  return state_->backend->wire_counts();
}

}  // namespace ferry
