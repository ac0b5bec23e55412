// Checks the scales that a dispatch is given: global_scale and input_scales.
#pragma once

#include "exchange/backend.hpp"

namespace ferry {

// True if receivers encode the rows, with a scale for each expert.
bool by_expert(const DispatchCall& call);

// Throws UsageError or UnsupportedError.
void check_scales(const Config& config, int rank, const DispatchCall& call);

}  // namespace ferry
