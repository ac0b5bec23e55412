// The row at which a part of received rows holds a row, for addresses by format/parts.hpp.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/host_device.hpp"
#include "ferry/exchange.hpp"
#include "format/parts.hpp"

namespace ferry::app {

// The groups of a result.
struct ScaleGroups {
  const std::int32_t* row_offsets = nullptr;   // [count]
  const std::int32_t* tile_offsets = nullptr;  // [count]; null where scales are not tiles
  int count = 0;
  // DispatchResult::capacity; expert_indexed: more, because it has no groups of rows.
  std::int64_t capacity = 0;

  static ScaleGroups of(const DispatchResult& received) {
    return {received.row_offsets, received.tile_offsets, received.groups,
            std::max(received.capacity, received.row_capacity)};
  }
  // Where the scales of `row` are, a row of some group: its tile row, its column row, or for other parts
  // `row`.
  FERRY_HD std::int64_t scale_row(const PartLayout& part, std::int64_t row, std::int64_t leading) const {
    if (!part.tiles) return column_row(part, row, capacity, leading);
    int group = 0;  // the last that begins here or before: empty groups begin where the next one does
    for (int end = count; end - group > 1;) {
      const int middle = (group + end) / 2;
      (row_offsets[middle] <= row ? group : end) = middle;
    }
    return kTileRows * tile_offsets[group] + row - row_offsets[group];
  }
};

inline std::int64_t scale_row(const DispatchResult& received, const PartLayout& part, std::int64_t row,
                              std::int64_t leading) {
  return ScaleGroups::of(received).scale_row(part, row, leading);
}

}  // namespace ferry::app
