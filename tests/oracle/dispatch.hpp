// What a dispatch brings to one rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "oracle/encode.hpp"
#include "oracle/global_inputs.hpp"
#include "oracle/row_positions.hpp"

namespace ferry::oracle {

// Values beside the rows. Entries of untouched rows (RankRows::rows) are undefined.
struct RowMetadata {
  std::vector<Source> source;              // [total]
  std::vector<float> weight;               // [total], rank_major [total, top_k]; empty without weights
  std::vector<std::int32_t> local_ids;     // rank_major [total, top_k]
  std::vector<std::int32_t> group_of_row;  // [total]
};

RowMetadata row_metadata(const GlobalInputs& global, const RowPositions& positions, int rank);

// Shapes of the parts as they arrive on `rank`.
std::vector<PartShape> arrived_shapes(const GlobalInputs& global, const RowPositions& positions, int rank);

// Writes the defined bytes of a part into `memory`, and no others.
void write_part(const GlobalInputs& global, const RowPositions& positions, int rank, int part,
                std::byte* memory);

// dots[row] = dot(x, v[row]): x is the row's token before weighing, v lies dense in `type`. Padding: 0.
std::vector<float> row_dots(const GlobalInputs& global, const RowPositions& positions, int rank,
                            const std::byte* v, DType type);

// The dot product in its fixed order of additions.
float dot(const std::vector<float>& x, const std::vector<float>& v);

}  // namespace ferry::oracle
