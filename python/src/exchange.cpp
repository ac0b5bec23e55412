#include "exchange.hpp"

#include <algorithm>

#include "arrays/framework.hpp"
#include "base/text.hpp"
#include "exchange/configuration.hpp"
#include "exchange/sliced.hpp"
#include "process_owner.hpp"

namespace ferry::python {

nb::object owner_of(const SharedState& state) {
  return nb::capsule(new SharedState(state),
                     [](void* shared) noexcept { delete static_cast<SharedState*>(shared); });
}

namespace {

ReceiveSizes receive_sizes_of(const Exchange& exchange) {
  const Config& config = exchange.config();
  const int rank = exchange.rank().index();
  const std::int64_t rows = row_capacity(config, rank), groups = groups_of(config, rank);
  const std::int64_t bytes = plan_bytes(config, config.placement.ranks());
  const bool padded = config.layout == Layout::expert_padded;
  return {.shape = padded ? Shape{groups, exchange.capacity(), config.hidden} : Shape{rows, config.hidden},
          .rows = rows,
          .groups = groups,
          .plan_bytes = bytes,
          .group_rows = padded ? exchange.capacity() : 0,
          .plan_shape = plan_shape(config.placement.tp() > 1 ? routed_config(config) : config),
          .weight = {kFp32, {rows}},
          .counts = {kInt32, {groups}},
          .row_offsets = {kInt32, {groups + 1}},
          .plan = {kByte, {bytes}}};
}

}  // namespace

PyExchange::PyExchange(SharedState state)
    : process_(this_process()),
      state_(std::move(state)),
      state_owner_(owner_of(state_)),
      sizes_(receive_sizes_of(state_->exchange)),
      lanes_(state_->lanes.size()) {}

ExchangeState& PyExchange::state() const {
  if (!state_) throw UsageError("exchange: used after destroy()");
  require_own_process("exchange", process_);
  return *state_;
}

void PyExchange::destroy() {
  state_.reset();
  state_owner_.reset();
  lanes_.clear();
  placeholder_.reset();
}

std::size_t PyExchange::checked_lane(int lane) const {
  const int lanes = config().lanes;
  if (lane < 0 || lane >= lanes) throw UsageError(str("lane = ", lane, ", must be 0 to ", lanes - 1));
  return static_cast<std::size_t>(lane);
}

PyDispatchResult PyExchange::make_result(int lane, const DispatchResult& received) const {
  const DispatchContext& context = lanes_[checked_lane(lane)].context;
  PyDispatchResult result{.received = received,
                          .context = context,
                          .state = state_,
                          .state_owner = state_owner_,
                          .plan = context.plan};
  if (!context.plan.is_none()) return result;
  const bool in_lane = context.memory.plan.is_none();
  PyPlan plan{.plan = received.plan,
              .owner = in_lane ? state_owner_ : context.memory.plan,
              .framework = context.framework,
              .device = context.device,
              .shape = sizes_.plan_shape,
              .tokens = context.tokens,
              .storage_writes = write_count(received.plan.storage())};
  if (config().placement.tp() > 1) {
    plan.all_tokens = plan.tokens;
    const int me = state_->exchange.rank().index(), tp = config().placement.tp();
    plan.tokens = TokenSlice::of(plan.all_tokens, me % tp, tp).count;
    if (is_host(context.device)) {
      plan.gathered_total = *received.total;
    } else {
      plan.row_bound = received.capacity;  // until the host has read the total
    }
  }
  if (in_lane) {
    plan.state = state_;
    plan.lane = lane;
    plan.plan_version = state_->lanes[static_cast<std::size_t>(lane)].plan_version;
    if (is_host(context.device))
      plan.header_check = view_plan(received.plan.storage(), plan.shape).header->check;
  }
  result.plan = nb::cast(std::move(plan));
  return result;
}

void* PyExchange::address_of(const Array& array) {
  alignas(16) static float on_host[4] = {};
  if (array.data != nullptr) return array.data;
  if (is_host(state().device)) return on_host;
  if (!placeholder_.is_valid()) placeholder_ = new_array(array.framework, kFp32, {4}, state().device);
  return inspect(placeholder_, "placeholder").data;
}

PyPlan plan_over(const PyExchange& self, const nb::object& storage, std::optional<std::int64_t> tokens) {
  ExchangeState& state = self.state();
  if (self.config().placement.tp() > 1) {
    throw UnsupportedError(
        "plan_over: experts in slices do not have it, because their plans do not hold all tokens: keep "
        "plan.copy()");
  }
  Arguments arguments(state.device);
  const Array& array = arguments.dense(storage, "storage", kByte, {-1});
  PyPlan result{.plan = Plan::over(array.data, static_cast<std::size_t>(array.shape[0])),
                .owner = array.owner,
                .framework = array.framework,
                .device = state.device,
                .shape = self.receive_sizes().plan_shape,
                .storage_writes = write_count(array.data)};
  const Plan& plan = result.plan;
  const auto needed = static_cast<std::size_t>(view_plan(nullptr, result.shape).bytes);
  if (plan.bytes() < needed)
    throw UsageError(
        str("storage: expected ", counted(needed, "byte"), " or more (plan_bytes), got ", plan.bytes()));
  const bool host = is_host(state.device);
  if (host && !is_complete(*static_cast<const PlanHeader*>(array.data)))
    throw UsageError("storage: does not hold a complete plan");
  if (!host && !tokens)
    throw UsageError("tokens: needed, because the host cannot read N from a plan in device memory");
  result.tokens = tokens.value_or(host ? plan.tokens() : 0);
  if (result.tokens < 0 || result.tokens > self.config().max_tokens)
    throw UsageError(str("tokens = ", result.tokens, ", must be 0 to ", self.config().max_tokens));
  if (host && result.tokens != plan.tokens())
    throw UsageError(str("tokens = ", result.tokens, ", but the plan has ", counted(plan.tokens(), "token")));
  return result;
}

}  // namespace ferry::python
