// Recorded traces: from arrays to a Trace.
#pragma once

#include <string>

#include "ferry/trace.hpp"
#include "trace/npy.hpp"

namespace ferry::trace {

// Opens `name` (see open_trace) in `directory`; experts = 0 means to find out.
Trace open_recorded(const std::string& name, const std::string& directory, int experts);

// Checks and converts. `weights` and `lengths` may be null. `known_experts`: E if the folder tells it, else
// 0; used when `experts` is 0.
Trace trace_from_arrays(const NpyArray& ids, const NpyArray* weights, const NpyArray* lengths, int experts,
                        int known_experts);

}  // namespace ferry::trace
