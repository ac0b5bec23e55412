// Where traces come from: specifications of synthetic ones, and NPY arrays of recorded ones.
#pragma once

#include <cstdint>
#include <string>

#include "ferry/trace.hpp"
#include "trace/npy.hpp"

namespace ferry::trace {

inline constexpr int kGroups = 8;         // group-limited routing: groups of neighbouring experts
inline constexpr int kGroupsOfToken = 4;  // group-limited routing: groups that hold a token's experts

// Most routes of a trace: 2 GiB of ids and weights.
inline constexpr std::int64_t kMaxRoutes = std::int64_t{1} << 28;

// Throws UsageError for a specification that no trace can satisfy.
void check(const SynthSpec& spec);

// The specification as parse_synth_spec() reads it, with every key.
std::string to_string(const SynthSpec& spec);

// Checks the arrays and converts them. `weights` and `lengths` may be null. When `experts` is 0, E is
// `known_experts` (of the folder's model), or if that is 0 too, derived from the largest id.
Trace trace_from_arrays(const NpyArray& ids, const NpyArray* weights, const NpyArray* lengths, int experts,
                        int known_experts);

}  // namespace ferry::trace
