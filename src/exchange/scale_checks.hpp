// Checks the scales that a dispatch is given: global_scale and input_scales.
#pragma once

#include "exchange/backend.hpp"
#include "format/parts.hpp"

namespace ferry {

// True if receivers encode the rows, with a scale for each expert.
bool by_expert(const DispatchCall& call);

// The parts of a row in the call's messages, and as it is received.
PartList message_parts(const Config& config, const DispatchCall& call);
PartList received_parts(const Config& config, const DispatchCall& call);

// Whether the format marks a block whose scale cannot be formed, with the scale 7F.
bool marks_bad_scales(const Format& format);

// Throws UsageError or UnsupportedError.
void check_scales(const Config& config, int rank, const DispatchCall& call);

}  // namespace ferry
