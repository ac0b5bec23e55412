// What the host can check of a call before it starts: arguments, not data.
#pragma once

#include "core/backend.hpp"

namespace ferry {

// Each throws UsageError or UnsupportedError with the numbers that matter. `config` is complete.
void check_dispatch(const Config& config, int rank, const DispatchCall& call);
void check_combine(const Config& config, int rank, const CombineCall& call, bool split);
// A plan that this rank's exchange can use: right shape, right rank, undamaged header.
void check_plan(const Config& config, int rank, const Plan& plan);

}  // namespace ferry
