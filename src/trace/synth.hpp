// Specifications of synthesised traces: checks and text.
#pragma once

#include <cstdint>
#include <string>

#include "ferry/trace.hpp"

namespace ferry::trace {

inline constexpr int kGroups = 8;  // of neighbouring experts, in group-limited routing
inline constexpr std::int64_t kMaxRoutes = std::int64_t{1} << 28;  // of a trace: 2 GiB of ids and weights
inline constexpr int kGroupsOfToken = 4;                           // most groups a token's experts lie in

// Throws UsageError for a specification no trace can meet.
void check(const SynthSpec& spec);

// In the grammar of parse_synth_spec, every key given.
std::string to_string(const SynthSpec& spec);

}  // namespace ferry::trace
