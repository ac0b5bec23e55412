// The bytes of one token's row as a rank receives it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "oracle/global_inputs.hpp"

namespace ferry::oracle {

// The memory layout of one part of the received rows: element e of row r is at byte r * row_step + e *
// element_step. Column-major scales of expert_padded: r is the position in the group, from the group's first
// byte. Tiles of scales: see scale_tiles.hpp.
struct PartShape {
  std::int64_t elements = 0;  // of a row: 1 if the row is contiguous; column-major scales: the columns
  std::int64_t element_bytes = 0;
  std::int64_t row_step = 0;
  std::int64_t element_step = 0;
  std::int64_t leading_dimension = 0;  // column-major: elements between two columns; otherwise 0
  std::int64_t group_rows = 0;         // column-major of expert_padded: rows of a group; otherwise 0
  std::int64_t tile_blocks = 0;        // scales as tiles: blocks of a row; otherwise 0

  // First byte of an element. Tiles: `row` is the tile row, 128 * (first tile of the group) + position.
  std::int64_t offset(std::int64_t row, std::int64_t element) const {
    if (group_rows > 0)
      return row / group_rows * elements * element_step + row % group_rows * row_step +
             element * element_step;
    if (tile_blocks == 0) return row * row_step + element * element_step;
    return 512 * (row / 128 * elements + element) + row % 32 * 16 + row % 128 / 32 * 4;
  }
  // ReceivedPart::row_bytes.
  std::int64_t row_bytes() const { return tile_blocks > 0 ? elements * 512 : element_bytes; }
  // Received memory for `rows` rows in `groups` groups.
  std::int64_t bytes_of(std::int64_t rows, std::int64_t groups) const {
    if (tile_blocks > 0) return ((rows + 127) / 128 + groups) * row_bytes();
    if (group_rows > 0) return groups * elements * element_step;
    return leading_dimension > 0 ? elements * element_step : rows * row_step;
  }
};

// The parts of a format, in order: values, then scales. `rows`: capacity of all groups together.
// `group_rows`: expert_padded: capacity of one group; other layouts: 0.
std::vector<PartShape> part_shapes(const Format& format, std::int64_t hidden, std::int64_t rows,
                                   std::int64_t group_rows);

// Bytes of a caller's dense row, for each part.
std::vector<std::int64_t> input_row_bytes(const Format& format, DType type, std::int64_t hidden);

// The parts of a row of these values in a quantised format. `g`: of nvfp4 without a scale of each row.
std::vector<std::vector<std::byte>> encoded_row(const std::vector<float>& values, const Format& format,
                                                float g = 1);

// Part `part` of token `token` of rank `rank`, elements in order. `weight`: factor of the values; null: none.
// `input_scale`: the scale of the row's expert, if there are input_scales; otherwise null.
std::vector<std::byte> encoded_part(const GlobalInputs& inputs, int rank, std::int64_t token, int part,
                                    const float* weight, const float* input_scale = nullptr);

}  // namespace ferry::oracle
