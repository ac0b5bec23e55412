// Kernels of GPU benchmarks around the timed calls: they write the experts' rows, compare received rows, and
// sort routes for the NCCL baseline. All functions enqueue on the stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "format/parts.hpp"
#include "tools/ferry/common/scale_row.hpp"

namespace ferry::app {

// A received row and its token, numbered rank * N + token.
struct RowToken {
  std::int32_t row, token;
};

// to[row] = from[token] for every position. Rows are multiples of 16 bytes.
void copy_rows(const RowToken* positions, std::int64_t count, const std::byte* from, std::byte* to,
               std::int64_t row_bytes, cudaStream_t stream);

// Received rows in their layout.
struct RowParts {
  PartList parts;
  const void* data[kMaxParts];
  std::int64_t leading[kMaxParts];  // leading dimensions
  ScaleGroups groups;
};

struct WrongRows {
  std::int32_t count, first;  // first: the lowest row, kNoRow if none
};
inline constexpr std::int32_t kNoRow = 0x7FFFFFFF;

// Compares every byte of the rows with messages[token], whose parts follow one another. The caller
// initialises `wrong` to {0, kNoRow}.
void count_wrong_rows(const RowToken* positions, std::int64_t count, const std::byte* messages,
                      const RowParts& rows, WrongRows* wrong, cudaStream_t stream);

// A rank's routes.
struct RouteList {
  const std::int32_t* ids;  // [routes], -1 for a masked slot
  std::int64_t routes;      // N * K
  int top_k;
  const std::int32_t* rank;  // [experts]
  int ranks;
};

// Counting sort by destination rank. row_of_route[route] is the route's index among the routes to the same
// rank, in their order; counts [ranks].
void sort_routes(const RouteList& list, std::int32_t* row_of_route, std::int32_t* counts,
                 cudaStream_t stream);

// Writes the tokens of the routes to rank 0, then to rank 1 and so on.
void gather_rows(const RouteList& list, const std::int32_t* row_of_route, const std::int32_t* counts,
                 const std::byte* tokens, std::byte* to, std::int64_t row_bytes, cudaStream_t stream);

}  // namespace ferry::app
