#include "backends/sliced/segments.hpp"

#include <numeric>
#include <span>

#include "plan/shapes.hpp"

namespace ferry::sliced {

std::int64_t Segments::first_of(int tp_rank) const {
  return std::accumulate(rows.begin(), rows.begin() + tp_rank, std::int64_t{0});
}

SegmentsOfPlan segments_of(const Config& config, int rank, const Plan& plan) {
  const int tp = config.placement.tp(), ranks = config.placement.ranks();
  const std::vector<int>& experts = config.placement.experts_of(rank);
  const std::span<const std::int32_t> counts = plan.counts();  // [R, E * tp]
  const std::int64_t capacity = row_capacity(config, rank);
  Segments made;
  made.rows.assign(static_cast<std::size_t>(tp), 0);
  made.row_offsets.push_back(0);
  for (const int expert : experts) {
    std::int64_t row = made.row_offsets.back();
    for (int source = 0; source < ranks; ++source) {
      const int tp_rank = source % tp;
      const std::int64_t entry = (std::int64_t{source} * config.experts + expert) * tp + tp_rank;
      const std::int64_t count = counts[static_cast<std::size_t>(entry)];
      if (count < 0 || row + count > capacity) return {.damaged = true, .segments = {}};
      std::int64_t& rows = made.rows[static_cast<std::size_t>(tp_rank)];
      if (count > 0) made.all.push_back({tp_rank, row, rows, count});
      rows += count;
      row += count;
    }
    made.counts.push_back(static_cast<std::int32_t>(row - made.row_offsets.back()));
    made.row_offsets.push_back(static_cast<std::int32_t>(align_up(row, config.alignment)));
  }
  for (Segment& segment : made.all) segment.gathered_row += made.first_of(segment.tp_rank);
  made.gathered = made.first_of(tp);
  const bool damaged =
      made.row_offsets.back() > capacity || made.rows[static_cast<std::size_t>(rank % tp)] != plan.total();
  if (damaged) return {.damaged = true, .segments = {}};
  return {.damaged = false, .segments = std::move(made)};
}

}  // namespace ferry::sliced
