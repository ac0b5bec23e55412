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

// A plan that this rank's exchange can use: right shape, right rank, undamaged header.
void check_plan(const Config& config, int rank, const Plan& plan, PlanIn plan_in);

}  // namespace ferry
