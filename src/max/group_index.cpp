#include <limits>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "ferry/max.hpp"
#include "layout/plan_layout.hpp"

namespace ferry::max {

GroupIndex group_index(std::span<const std::int32_t> counts, int alignment) {
  if (alignment < 1) throw UsageError(str("alignment = ", alignment, ", must be 1 or more"));
  GroupIndex index;
  std::int64_t row = 0;
  index.row_offsets.push_back(0);
  for (std::size_t group = 0; group < counts.size(); ++group) {
    const std::int32_t count = counts[group];
    if (count < 0) throw UsageError(str("counts[", group, "] = ", count, ", must be 0 or more"));
    if (count == 0) continue;
    row = align_up(row + count, alignment);
    if (row > std::numeric_limits<std::int32_t>::max()) {
      throw UsageError(str("counts[0] to counts[", group, "] add up to ", row, " rows, must be at most ",
                           std::numeric_limits<std::int32_t>::max()));
    }
    index.expert_ids.push_back(static_cast<std::int32_t>(group));
    index.row_offsets.push_back(static_cast<std::uint32_t>(row));
  }
  return index;
}

}  // namespace ferry::max
