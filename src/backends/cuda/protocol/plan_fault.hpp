// Reasons why a plan, or the arguments beside it, cannot be used. Only the device can see them: plans lie in
// its memory.
#pragma once

#include <cstdint>

namespace ferry::cuda {

enum class PlanFault : std::int32_t {
  none,
  damaged,             // the header does not match its checksum
  configuration,       // made by an exchange of another configuration or placement
  arrays,              // of a combine by source: they make no plan
  rank,                // made on another rank
  tokens,              // another number of tokens than in this call
  outputs_and_result,  // combine: outputs are null for rows of the plan, or the result for tokens
  values,              // combine: row_values or route_values is missing
  weights,             // combine: topk_weights that travel are null where the plan has tokens
  null_values          // route_values, return_values: an array is null where the plan has tokens or rows
};

}  // namespace ferry::cuda
