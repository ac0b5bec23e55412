// What the host can check of a call before it starts: arguments, not data.
#pragma once

#include "exchange/backend.hpp"

namespace ferry {

// Where a plan lies decides who can look into it: what the host cannot see, a device backend checks in the
// call.
enum class PlanIn { host, device };

// Each throws UsageError or UnsupportedError with the numbers that matter. `config` is complete.
void check_dispatch(const Config& config, int rank, const DispatchCall& call, PlanIn plan_in);
void check_combine(const Config& config, int rank, const CombineCall& call, bool split, PlanIn plan_in);

// What ranks compare when they use plans, as options of a call.
inline constexpr const char* kPlanOption = "call that made the plan";
// Number of the call that made a plan, 0 for none: the same on every rank that uses plans of one dispatch.
std::int64_t made_by(const Plan& plan);
// Partial sums are weighed where the experts are, so home weights travel first and every rank takes part.
inline constexpr const char* kTopkWeightsOption =
    "topk_weights given (with partial on every rank or none, also without tokens)";

// A plan that this rank's exchange can use: right shape, right rank, undamaged header.
void check_plan(const Config& config, int rank, const Plan& plan, PlanIn plan_in);

}  // namespace ferry
