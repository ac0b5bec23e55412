// Checks the scales that a dispatch is given: global_scale and input_scales.
#pragma once

#include "exchange/backend.hpp"

namespace ferry {

// Whether rows are encoded where they arrive, with a scale of their expert.
bool by_expert(const DispatchCall& call);

// Throws UsageError or UnsupportedError.
void check_scales(const Config& config, int rank, const DispatchCall& call);

}  // namespace ferry
