// A row whose number is known only to the rank that holds it.
#pragma once

#include <cstdint>

namespace ferry {

// In a plan's route_row, for the combines of host backends that return every row: the destination holds a row
// of the route, and finds it by token and slot in the `sources` of its own plan. Plans of a dispatch have no
// such entries; those made from src_info (src/max) do.
inline constexpr std::int32_t kRowOfPeer = -2;

}  // namespace ferry
