// Checks of a call's arguments that the host can make before the call starts. They do not look at the data.
#pragma once

#include "exchange/backend.hpp"

namespace ferry {

// The memory that plans are in. The host cannot read a plan in device memory: the device checks it during the
// call.
enum class PlanIn { host, device };

// Each throws UsageError or UnsupportedError, with the numbers that matter. `config` is complete.
// `call`: its name in messages.
void check_ids(const Config& config, int rank, const char* call, const Ids& ids, std::int64_t tokens);
void check_dispatch(const Config& config, int rank, const DispatchCall& call, PlanIn plan_in);
void check_combine(const Config& config, int rank, const CombineCall& call, bool split, PlanIn plan_in);

// Throws unless this rank can use the plan: right shape, right rank, undamaged header. `config` is complete.
void check_plan(const Config& config, int rank, const Plan& plan, PlanIn plan_in);

}  // namespace ferry
