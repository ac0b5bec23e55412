// What a bench does with rows on a GPU besides the calls it times. Everything is put on the stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "format/parts.hpp"

namespace ferry::app {

// A token (rank * N + token) and the row it stands in.
struct RowToken {
  std::int32_t row, token;
};

// to[row] = from[token] for every place; rows are multiples of 16 bytes.
void copy_rows(const RowToken* positions, std::int64_t count, const std::byte* from, std::byte* to,
               std::int64_t row_bytes, cudaStream_t stream);

// Arrived rows as they lie.
struct RowParts {
  PartList parts;
  const void* data[kMaxParts];
  std::int64_t leading[kMaxParts];
};

struct WrongRows {
  std::int32_t count, first;  // first: the lowest, kNoRow if there is none
};
inline constexpr std::int32_t kNoRow = 0x7FFFFFFF;

// Compares every byte with messages[token], whose parts follow one another. `wrong` starts as {0, kNoRow}.
void count_wrong_rows(const RowToken* positions, std::int64_t count, const std::byte* messages,
                      const RowParts& rows, WrongRows* wrong, cudaStream_t stream);

}  // namespace ferry::app
