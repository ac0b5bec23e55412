// The expected results of dispatch on one rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "oracle/encode.hpp"
#include "oracle/global_inputs.hpp"
#include "oracle/row_positions.hpp"

namespace ferry::oracle {

// The arrays beside the rows. Entries of untouched rows (see RowState) are undefined.
struct RowMetadata {
  std::vector<Source> source;              // [total]
  std::vector<float> weight;               // [total], rank_major [total, top_k]; empty without weights
  std::vector<std::int32_t> local_ids;     // rank_major [total, top_k]
  std::vector<std::int32_t> group_of_row;  // [total]
};

RowMetadata row_metadata(const GlobalInputs& inputs, const RowPositions& positions, int rank);

// The shapes of the received parts on `rank`.
std::vector<PartShape> received_shapes(const GlobalInputs& inputs, const RowPositions& positions, int rank);

// First row of tiles of each group on `rank`, then their end: DispatchResult::tile_offsets.
std::vector<std::int32_t> group_tiles(const GlobalInputs& inputs, const RowPositions& positions, int rank);

// Writes the expected bytes of a part into `memory`. Leaves bytes that the contract does not define
// unchanged.
void write_part(const GlobalInputs& inputs, const RowPositions& positions, int rank, int part,
                std::byte* memory);

// dots[row] = dot(x, v[row]); padding rows and rows of shared experts get 0. x is the row's token before
// apply_weights; v [total, hidden] is dense, of type `type`.
std::vector<float> row_dots(const GlobalInputs& inputs, const RowPositions& positions, int rank,
                            const std::byte* v, DType type);

// The dot product, added in the order that the contract fixes.
float dot(const std::vector<float>& x, const std::vector<float>& v);

}  // namespace ferry::oracle
