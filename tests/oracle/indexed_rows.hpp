// The layout expert_indexed: which tokens a rank stores, and which of them each position holds.
#pragma once

#include <cstdint>
#include <vector>

#include "oracle/global_inputs.hpp"
#include "oracle/row_positions.hpp"

namespace ferry::oracle {

struct IndexedRows {
  std::int64_t capacity = 0;                 // rows
  std::vector<Source> source;                // [rows] slot -1
  std::vector<std::int32_t> source_offsets;  // [R + 1]
  std::vector<std::int32_t> index, slot;     // [total] of positions
  std::vector<std::int32_t> block_group;     // [capacity of positions / alignment]
};

IndexedRows indexed_rows(const GlobalInputs& inputs, const RowPositions& positions, int rank);

}  // namespace ferry::oracle
