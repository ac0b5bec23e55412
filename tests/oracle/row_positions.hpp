// The row of every route: the order that the contract fixes, found by sorting.
#pragma once

#include <cstdint>
#include <vector>

#include "ferry/error.hpp"
#include "ferry/plan.hpp"
#include "oracle/global_inputs.hpp"

namespace ferry::oracle {

inline std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

enum class RowState : std::uint8_t {
  untouched,  // never written or read: in expert_padded, the end of an expert's segment
  padding,    // source {-1, -1, -1}, weight 0
  kept,       // holds a route's token; in rank_major a token
};

struct RowInfo {
  RowState state = RowState::untouched;
  int group = -1;  // of kept rows
  Source source;
};

// The rows of one rank.
struct RankRows {
  std::int64_t capacity = 0;  // rows; expert_padded: rows of each expert
  std::vector<std::int32_t> counts, row_offsets, group_expert;
  std::vector<RowInfo> rows;  // [total]
  std::int64_t needed = 0;    // the capacity that would hold all rows
  std::int64_t dropped = 0;   // routes and shared rows; rank_major: rows
};

// Where a route goes.
struct RouteTarget {
  int destination = -1;   // rank; -1: masked or bad
  int local = -1;         // local expert there
  std::int64_t row = -1;  // -1: masked, bad or dropped
};

struct RowPositions {
  int top_k = 0;
  std::vector<RankRows> ranks;
  std::vector<std::vector<RouteTarget>> routes;  // [source rank][tokens, top_k]
  // [rank][shared expert][tokens] the row on the token's own rank; -1: dropped
  std::vector<std::vector<std::vector<std::int64_t>>> shared_rows;
  std::vector<std::int32_t> counts;          // [ranks, replicas of all experts], drops included
  std::vector<std::int32_t> tokens_between;  // [ranks, ranks], drops included
  std::vector<BadId> bad_ids;                // [ranks]; count 0: none
  Overflow overflow;                         // rank -1: none

  int size() const { return static_cast<int>(ranks.size()); }
  std::int64_t tokens(int rank) const { return static_cast<std::int64_t>(routes[rank].size()) / top_k; }
  const RouteTarget& route(int rank, std::int64_t token, int slot) const {
    return routes[rank][token * top_k + slot];
  }
};

// The placement of the configuration; if it has none, consecutive experts in blocks of equal size.
Placement placement_of(const Config& config, int ranks);

// Groups of routed experts on a rank: those of Config::local_slots, or one for each expert.
int expert_groups(const Config& config, const Placement& placement, int rank);

// Rows that a rank can receive; expert_padded: rows of one expert.
std::int64_t capacity_of(const Config& config, const Placement& placement, int rank);

// Computes all positions, in every layout, from the ids of all ranks.
RowPositions find_row_positions(const GlobalInputs& inputs);

// The overflow of a dispatch with these positions; rank -1: none. `limits` [R], or empty: the rows that the
// memory of each rank holds and may not be exceeded; -1: the capacity alone counts.
Overflow find_overflow(const RowPositions& positions, const std::vector<std::int64_t>& limits = {});

}  // namespace ferry::oracle
