// Where the rows of each slice's senders lie, on a rank of experts in slices.
#pragma once

#include <cstdint>
#include <vector>

#include "ferry/config.hpp"
#include "ferry/plan.hpp"

namespace ferry::sliced {

// Rows of one expert from one rank: they are consecutive in both orders.
struct Segment {
  int tp_rank;       // of the rank that sent them, and of the rank that received them before the gather
  std::int64_t row;  // the first of them among the received rows, in the order of the contract
  std::int64_t gathered_row;  // the first of them as all_gather_v places it: by tp rank, then expert
  std::int64_t count;
};

struct Segments {
  std::vector<Segment> all;
  std::vector<std::int64_t> rows;         // [tp] rows that each rank of the sub-group received
  std::vector<std::int32_t> counts;       // [L]
  std::vector<std::int32_t> row_offsets;  // [L + 1]
  std::int64_t gathered = 0;              // sum of `rows`: without padding

  // First gathered row of a tp rank.
  std::int64_t first_of(int tp_rank) const;
};

// Computed from the plan's counts, which every rank has. Returns no rows if the plan is damaged: its counts
// do not agree with its total, or are more than a rank can receive.
struct SegmentsOfPlan {
  bool damaged = false;
  Segments segments;
};
SegmentsOfPlan segments_of(const Config& config, int rank, const Plan& plan);

}  // namespace ferry::sliced
