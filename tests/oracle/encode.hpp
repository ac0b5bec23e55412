// One token's row in the bytes in which it arrives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "oracle/global_inputs.hpp"

namespace ferry::oracle {

// How one part of arrived rows lies in memory: element e of row r at r * row_step + e * element_step bytes.
struct PartShape {
  std::int64_t elements = 0;  // rows: 1; column-major scales: the columns
  std::int64_t element_bytes = 0;
  std::int64_t row_step = 0;
  std::int64_t element_step = 0;
  std::int64_t leading_dimension = 0;  // column-major: elements from column to column; otherwise 0

  std::int64_t bytes_of(std::int64_t rows) const {
    return leading_dimension > 0 ? elements * element_step : rows * row_step;
  }
};

// Parts of a format's rows, in order: values, then scales. `rows`: the capacity of all groups together.
std::vector<PartShape> part_shapes(const Format& format, std::int64_t hidden, std::int64_t rows);

// Bytes of one dense row as the caller brings it, for each part.
std::vector<std::int64_t> input_row_bytes(const Format& format, DType type, std::int64_t hidden);

// The bytes of part `part` of token `token` of rank `rank`, elements in order. `weight`: multiplies the
// values.
std::vector<std::byte> encoded_part(const GlobalInputs& global, int rank, std::int64_t token, int part,
                                    const float* weight);

}  // namespace ferry::oracle
