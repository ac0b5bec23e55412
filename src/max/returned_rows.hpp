// Makes the plan of a combine from src_info, row_offsets and counts, and checks that every row has come back.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ferry/config.hpp"
#include "ferry/exchange.hpp"
#include "layout/plan_layout.hpp"

namespace ferry::max {

// The arguments of a combine: about the rows that this rank returns, and the rows that return to it.
struct ReturnedRows {
  std::span<const std::int32_t> src_info;      // [rows, 2]; may be longer
  std::span<const std::uint32_t> row_offsets;  // of the groups that have rows, then the number of rows
  std::span<const std::int32_t> counts;        // [S + L, R]
  Ids topk_ids;                                // [tokens, K]
  std::int64_t tokens = 0;
};

// One fp32 travels with each row: a tag, which names the row's expert and the combine. A source rank that
// finds another tag in a slot has not got the row in this call.
struct ReturnTags {
  std::vector<float> rows;    // [rows] of the rows that this rank returns
  std::vector<float> routes;  // [N, K] that must come; 0 for masked slots
};

// Fills `plan`, whose storage is of plan_shape(config), for combines with the reductions exact and unreduced
// on host backends; and the tags of combine number `combine` of the lane. Ids out of range are masked slots.
// Throws UsageError, with the numbers, if the arguments contradict each other or `config`, which is complete.
void plan_return(const Config& config, int rank, const ReturnedRows& rows, std::uint64_t combine,
                 const PlanView& plan, ReturnTags& tags);

// Throws UsageError for the first route whose row has not come back. `returned`: [N, K], the values that
// combine has returned for the tags of the rows.
void check_returned(const Config& config, const PlanView& plan, const ReturnTags& tags,
                    std::span<const float> returned);

}  // namespace ferry::max
