// Reads recorded traces from NPY arrays.
#pragma once

#include <string>

#include "ferry/trace.hpp"
#include "trace/npy.hpp"

namespace ferry::trace {

// Opens `name` (see open_trace()) in `directory`. experts = 0: derived from the folder or the ids.
Trace open_recorded(const std::string& name, const std::string& directory, int experts);

// Checks the arrays and converts them. `weights` and `lengths` may be null. When `experts` is 0, E is
// `known_experts` (of the folder's model), or if that is 0 too, derived from the largest id.
Trace trace_from_arrays(const NpyArray& ids, const NpyArray* weights, const NpyArray* lengths, int experts,
                        int known_experts);

}  // namespace ferry::trace
