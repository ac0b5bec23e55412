// Planning: the only code that reads ids. Pure: ids, placement and the counts of all ranks in, places out.
// Order comes from prefix sums, never from timing.
#pragma once

#include <cstdint>
#include <vector>

#include "ferry/config.hpp"
#include "ferry/error.hpp"
#include "ferry/exchange.hpp"
#include "layout/plan_layout.hpp"

namespace ferry {

// First half, from this rank's ids alone: destinations, each token's ranks, send lists, this rank's counts.
// Fills route_expert, route_rank, token_ranks, sent_tokens and the own rows of counts and tokens_between. Bad
// ids are skipped and noted.
void plan_sends(const Config& config, int rank, const Ids& ids, int tokens, const PlanView& plan, BadId& bad);

// The rows of a rank, from the counts of all ranks. For expert layouts places are asked by (expert, source),
// for rank_major by (destination, source).
class RowPlaces {
 public:
  // `counts` and `tokens_between` of `plan` are complete.
  void compute(const Config& config, const PlanView& plan);

  // First row, on the expert's rank, of the routes from `source`; row_or_dropped() turns a row into -1 past
  // the capacity. expert_padded rows are counted inside the expert until then.
  std::int64_t first_row(int expert, int source) const {
    return first_[static_cast<std::size_t>(expert) * static_cast<std::size_t>(ranks_) +
                  static_cast<std::size_t>(source)];
  }
  std::int64_t first_row_from(int destination, int source) const { return first_row(destination, source); }
  std::int32_t row_or_dropped(int rank, int local_expert, std::int64_t row) const;

  // Of this rank's groups: kept rows and where the group starts.
  std::int64_t count(int rank, int group) const;
  std::int64_t offset(int rank, int group) const;
  std::int64_t total(int rank) const;

  // needed > capacity on some rank: routes (rank_major: rows) were dropped.
  const Overflow& overflow() const { return overflow_; }

 private:
  void note_need(int rank, std::int64_t capacity, std::int64_t needed);
  void compute_expert_rows(const Config& config, const PlanView& plan);
  void compute_rank_rows(const Config& config, const PlanView& plan);

  int ranks_ = 0;
  Layout layout_ = Layout::expert_major;
  std::vector<std::int64_t> first_;                // [E, R] or, rank_major, [R destinations, R sources]
  std::vector<std::vector<std::int64_t>> count_;   // by rank, by group: routes, capacity not applied
  std::vector<std::vector<std::int64_t>> offset_;  // by rank, groups + 1, capacity not applied
  std::vector<std::int64_t> capacity_;             // by rank: rows; expert_padded: rows an expert
  Overflow overflow_;
};

// Second half: rows of this rank's own routes (route_row), from route_expert: the caller may have reused the
// ids.
void plan_rows(const Config& config, int rank, const RowPlaces& places, const PlanView& plan);

// Places what arrives. One object a call; messages of a source come in order, sources in any.
class ArrivalPlacer {
 public:
  ArrivalPlacer(const Config& config, int rank, const RowPlaces& places, const PlanView& plan);

  // Message i of `source` is about `token` with these K global ids, this rank being at `position` of the
  // token's ranks. Fills came_* and sources; returns the K rows here (-1: elsewhere, masked, dropped).
  const std::int32_t* place(int source, std::int64_t i, int token, int position, const std::int32_t* ids);

 private:
  const Config& config_;
  int rank_;
  std::int64_t groups_;
  const RowPlaces& places_;
  PlanView plan_;
  std::vector<std::int64_t>
      next_;  // [R, groups] the source's next row: in each local expert, or (rank_major) at all
};

}  // namespace ferry
