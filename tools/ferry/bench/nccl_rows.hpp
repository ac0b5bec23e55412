// Sorts routes by the rank they go to, as callers of NCCL do. Everything is put on the stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace ferry::app {

struct RouteList {
  const std::int32_t* ids;  // [routes], -1 for none
  std::int64_t routes;      // N * K
  int top_k;
  const std::int32_t* rank;  // [experts]
  int ranks;
};

// place[route] among the routes to the same rank, in their order; counts[rank].
void sort_routes(const RouteList& list, std::int32_t* place, std::int32_t* counts, cudaStream_t stream);

// to: the tokens of the routes to rank 0, then to rank 1 and so on.
void gather_rows(const RouteList& list, const std::int32_t* place, const std::int32_t* counts,
                 const std::byte* tokens, std::byte* to, std::int64_t row_bytes, cudaStream_t stream);

}  // namespace ferry::app
