// Where the scales of received rows lie in tiles of 128 rows (docs/formats.md, "Scales as tiles").
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ferry/types.hpp"

namespace ferry {

// The tiles of the groups of one rank in one dispatch.
class ScaleTiles {
 public:
  // `offsets` and `counts` [groups]: each group's first row, ascending, and its rows. `group_capacity`:
  // expert_padded: rows that a group has room for. `limit`: rows of tiles in memory; counts from a damaged
  // plan may need more, which then have no tiles.
  void compute(Layout layout, std::span<const std::int32_t> offsets, std::span<const std::int32_t> counts,
               std::int64_t group_capacity, std::int64_t limit);

  // [groups + 1] the first row of tiles of each group.
  std::span<const std::int32_t> first() const { return first_; }
  // Rows of tiles that hold rows of the group.
  std::int64_t used(std::size_t group) const { return used_[group]; }
  // The tile row of a row, or -1 if no used tile holds it.
  std::int64_t tile_row(std::int64_t row) const;

 private:
  std::vector<std::int32_t> offsets_, first_, used_;
};

}  // namespace ferry
