#include "plan/scale_tiles.hpp"

#include <algorithm>

#include "format/parts.hpp"

namespace ferry {

void ScaleTiles::compute(Layout layout, std::span<const std::int32_t> offsets,
                         std::span<const std::int32_t> counts, std::int64_t group_capacity,
                         std::int64_t limit) {
  offsets_.assign(offsets.begin(), offsets.end());
  used_.clear();
  first_.assign(1, 0);
  for (const std::int32_t count : counts) {
    const std::int64_t begin = first_.back();
    const std::int64_t room = layout == Layout::expert_padded ? row_tiles(group_capacity) : row_tiles(count);
    used_.push_back(static_cast<std::int32_t>(std::min(row_tiles(count), limit - begin)));
    first_.push_back(static_cast<std::int32_t>(std::min(begin + room, limit)));
  }
}

std::int64_t ScaleTiles::tile_row(std::int64_t row) const {
  // Empty groups begin where the next one does: the last of them that begins here or before holds the row.
  const auto next = std::upper_bound(offsets_.begin(), offsets_.end(), row);
  if (next == offsets_.begin()) return -1;
  const auto group = static_cast<std::size_t>(next - offsets_.begin() - 1);
  const std::int64_t position = row - offsets_[group];
  return position < kTileRows * used_[group] ? kTileRows * first_[group] + position : -1;
}

}  // namespace ferry
