// Operations that carry a few numbers instead of rows.
#pragma once

#include "backends/cpu/lane.hpp"

namespace ferry::cpu {

// One fp32 a route [N, K] to its row: row_values[row], 0 on padding inside the total.
void carry_route_values(Lane& lane, const float* values, const Plan& plan, float* row_values);

// The first call of a combine with home weights and partial sums: they go where the sums are made.
void send_topk_weights(Lane& lane, const CombineCall& call, float* row_weights);

// Leaves [sum, prefix before this rank, maximum] of the ranks' counts in lane.metadata.
void exchange_metadata(Lane& lane, std::int32_t count);

}  // namespace ferry::cpu
