// Operations that carry one number for each route or rank instead of rows: route values, weights, metadata.
#pragma once

#include "backends/cpu/lane.hpp"

namespace ferry::cpu {

// Sends each route's value to its row: `values` [N, K] to row_values [rows]; padding rows get 0.
void send_route_values(Lane& lane, const float* values, const Plan& plan, float* row_values);

// The first call of a combine with topk_weights and partial sums: sends each route's weight to its row,
// because the sums are computed there. Fills row_weights [rows].
void send_topk_weights(Lane& lane, const CombineCall& call, float* row_weights);

// Counts what a dispatch of these ids delivers to this rank. The arrays are those of the lane.
DispatchCounts exchange_dispatch_counts(Lane& lane, const Ids& ids, std::int32_t tokens);

// Stores the sum of all ranks' counts, the sum of those of lower ranks, and the largest in lane.metadata.
void exchange_metadata(Lane& lane, std::int32_t count);

}  // namespace ferry::cpu
