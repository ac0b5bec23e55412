// Specifications of synthetic traces: checks and text.
#pragma once

#include <cstdint>
#include <string>

#include "ferry/trace.hpp"

namespace ferry::trace {

inline constexpr int kGroups = 8;         // group-limited routing: groups of neighbouring experts
inline constexpr int kGroupsOfToken = 4;  // group-limited routing: groups that hold a token's experts

// Most routes of a trace: 2 GiB of ids and weights.
inline constexpr std::int64_t kMaxRoutes = std::int64_t{1} << 28;

// Throws UsageError for a specification that no trace can satisfy.
void check(const SynthSpec& spec);

// The specification as parse_synth_spec() reads it, with every key.
std::string to_string(const SynthSpec& spec);

}  // namespace ferry::trace
