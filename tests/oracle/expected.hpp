// The expected step metadata, and the number of messages that a call sends between ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "ferry/exchange.hpp"
#include "oracle/row_positions.hpp"

namespace ferry::oracle {

// The result of Exchange::metadata on `rank`, from the counts of all ranks.
StepMetadata step_metadata(const std::vector<std::int32_t>& counts, int rank);

// Messages that `rank` sends to other ranks in a dispatch: one for each (token, remote rank).
std::int64_t dispatch_messages(const RowPositions& positions, int rank);

// Messages that `rank` sends to other ranks in a combine. partial: one for each token of another rank with a
// route here; otherwise one for each kept row of another rank.
std::int64_t combine_messages(const RowPositions& positions, int rank, Reduction reduction);

}  // namespace ferry::oracle
