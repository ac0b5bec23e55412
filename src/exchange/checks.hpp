// Checks of a call's arguments that the host can make before the call starts. They do not look at the data.
#pragma once

#include "exchange/backend.hpp"

namespace ferry {

// The memory that plans are in. The host cannot read a plan in device memory: the device checks it during the
// call.
enum class PlanIn { host, device };

// Each throws UsageError or UnsupportedError, with the numbers that matter. `config` is complete.
void check_dispatch(const Config& config, int rank, const DispatchCall& call, PlanIn plan_in);
void check_combine(const Config& config, int rank, const CombineCall& call, bool split, PlanIn plan_in);

// Throws unless this rank can use the plan: right shape, right rank, undamaged header. `config` is complete.
void check_plan(const Config& config, int rank, const Plan& plan, PlanIn plan_in);

// Call options that every rank must pass alike, and that the ranks compare at the start of a call.

// The dispatch that made the plan of a call: plans used together must be of the same dispatch.
inline constexpr const char* kPlanOption = "call that made the plan";
// Number of the call that made `plan`; 0 for an empty plan.
std::int64_t made_by(const Plan& plan);

// Partial sums are weighted on the experts' ranks. topk_weights are therefore sent there first, in a step in
// which every rank takes part.
inline constexpr const char* kTopkWeightsOption =
    "topk_weights given (with partial on every rank or none, also without tokens)";

}  // namespace ferry
