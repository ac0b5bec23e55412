// Experts sliced by tensor parallelism (Placement::ep_tp): how their exchange is built on one without slices,
// and what it does not support.
#pragma once

#include <cstdint>

#include "exchange/backend.hpp"
#include "plan/slot.hpp"

namespace ferry {

// The configuration that routes a slice of the tokens to the ranks with the same tp rank. Slice i of expert e
// is its expert e * tp + i. `config` is complete.
Config routed_config(const Config& config);

// The load of an exchange whose lanes inside have counted `slices`.
LoadCounts load_of_slices(const LoadCounts& slices, const Config& config);
// Corrects a bad id that a lane inside has found: its token becomes that among all N, its id the one that was
// passed.
void unsliced_id(const Config& config, std::int64_t first_token, BadId& bad);

// Each throws UsageError or UnsupportedError for what experts in slices do not support.
void check_sliced(const Config& config);
void check_sliced_dispatch(const DispatchCall& call);
void check_sliced_combine(const CombineCall& call);

}  // namespace ferry
