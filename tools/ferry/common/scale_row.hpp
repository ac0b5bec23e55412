// The row at which a part of received rows holds a row, for addresses by format/parts.hpp.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ferry/exchange.hpp"
#include "format/parts.hpp"

namespace ferry::app {

// Scales as tiles: the tile row of `row`, a row of some group. Other parts: `row`.
inline std::int64_t scale_row(const DispatchResult& received, const PartLayout& part, std::int64_t row) {
  if (!part.tiles) return row;
  const std::int32_t* const end = received.row_offsets + received.groups;
  const std::int64_t group = std::upper_bound(received.row_offsets, end, row) - received.row_offsets - 1;
  return kTileRows * received.tile_offsets[group] + row - received.row_offsets[group];
}

}  // namespace ferry::app
