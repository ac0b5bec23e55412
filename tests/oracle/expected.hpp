// Small facts about whole calls: step metadata and what has to cross between ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "ferry/exchange.hpp"
#include "oracle/row_positions.hpp"

namespace ferry::oracle {

StepMetadata step_metadata(const std::vector<std::int32_t>& counts, int rank);

// Messages `rank` writes to other ranks: a dispatch needs one for each (token, remote rank).
std::int64_t dispatch_messages(const RowPositions& positions, int rank);

// Rows `rank` writes to other ranks: partial, one for each (token, remote home); otherwise one for each route
// kept here.
std::int64_t combine_messages(const RowPositions& positions, int rank, Reduction reduction);

}  // namespace ferry::oracle
