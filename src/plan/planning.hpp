// Plans a dispatch on the host: from expert ids, placement and the counts of all ranks to the row of every
// route. The functions are pure; order comes from prefix sums, never from timing.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ferry/config.hpp"
#include "ferry/error.hpp"
#include "ferry/exchange.hpp"
#include "ferry/types.hpp"
#include "layout/plan_layout.hpp"

namespace ferry {

// Step 1, from this rank's ids alone: fills route_expert, route_rank, token_ranks, sent_tokens and this
// rank's rows of counts and tokens_between. Bad ids are skipped; `bad` gets the first and their count.
void plan_sends(const Config& config, int rank, const Ids& ids, int tokens, const PlanView& plan, BadId& bad);

// Step 2, from the counts of all ranks: where the rows of each (expert, source) begin, or in rank_major those
// of each (destination, source). Rows of shared experts are counted here; SharedRows has their positions.
class RowOffsetTable {
 public:
  // Call it when `counts`, `tokens_between` and `rank_tokens` of `plan` are complete.
  void compute(const Config& config, const PlanView& plan);

  // The first row, at the expert's rank, of the routes from `source`. It may be past the capacity, and in
  // expert_padded it is relative to the group; row_or_dropped() turns it into the final row.
  std::int64_t first_row(int expert, int source) const {
    return first_[static_cast<std::size_t>(expert) * static_cast<std::size_t>(ranks_) +
                  static_cast<std::size_t>(source)];
  }
  std::int64_t first_row_from(int destination, int source) const { return first_row(destination, source); }
  // The final row of a row of `group`, or -1 if it is past the capacity.
  std::int32_t row_or_dropped(int rank, int group, std::int64_t row) const;

  // A group's rows within the capacity; its first row; the total of rows.
  std::int64_t count(int rank, int group) const;
  std::int64_t offset(int rank, int group) const;
  std::int64_t total(int rank) const;

  // Routes and shared rows (rank_major: rows) past the capacity, on all ranks together.
  std::int64_t dropped() const { return dropped_; }
  // The overflow of the rank that needs the most rows beyond its capacity or its limit; dropped = 0: none.
  // `limits` [R]: DispatchCall::row_limit() of each rank.
  Overflow overflow(std::span<const std::int32_t> limits) const;

 private:
  void compute_expert_rows(const Config& config, const PlanView& plan);
  void compute_rank_rows(const Config& config, const PlanView& plan);

  int ranks_ = 0;
  Layout layout_ = Layout::expert_major;
  std::vector<std::int64_t> first_;  // [E, R] or, rank_major, [R destinations, R sources]
  // By rank, by group: routes or shared rows, those past the capacity included.
  std::vector<std::vector<std::int64_t>> count_;
  std::vector<std::vector<std::int64_t>> offset_;  // by rank, groups + 1: first rows, capacity not applied
  std::vector<std::int64_t> capacity_;             // by rank: rows; expert_padded: rows an expert
  // By rank: rows, or in expert_padded those of the fullest expert, that it would need.
  std::vector<std::int64_t> needed_;
  std::int64_t dropped_ = 0;
};

// Step 3: fills route_row, the rows of this rank's own routes. Reads route_expert, not the ids: the caller
// may have reused their memory.
void plan_rows(const Config& config, int rank, const RowOffsetTable& offsets, const PlanView& plan);

// Step 4: assigns rows to the slots of received messages. One object for each call. A source's messages come
// in order; sources may be interleaved.
class RowAssigner {
 public:
  RowAssigner(const Config& config, int rank, const RowOffsetTable& offsets, const PlanView& plan);

  // Assigns rows to message i of `source`: for `token`, with the K expert ids `ids`; this rank has index
  // `position` in the token's list of destinations. Fills received_* and sources; returns the K rows here
  // (-1: another rank's, masked or dropped).
  const std::int32_t* assign(int source, std::int64_t i, int token, int position, const std::int32_t* ids);

 private:
  const Config& config_;
  int rank_;
  std::int64_t groups_;
  const RowOffsetTable& offsets_;
  PlanView plan_;
  // [R, groups] the source's next row in each group; rank_major: [R] its next row.
  std::vector<std::int64_t> next_;
};

// Where the scales of received rows lie in tiles of 128 rows (docs/formats.md, "Scales as tiles").
//
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
