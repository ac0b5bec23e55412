#include <algorithm>

#include "backends/cuda/host/error.hpp"
#include "tools/ferry/bench/nccl_rows.hpp"

namespace ferry::app {

namespace {

constexpr int kWarps = 32, kThreads = 32 * kWarps;
constexpr int kCopying = 256;
constexpr std::int64_t kMostBlocks = 4096;

__device__ int rank_of(const RouteList& list, std::int64_t route) {
  const std::int32_t id = list.ids[route];
  return id < 0 ? -1 : list.rank[id];
}

// A block for each rank walks all routes.
__global__ void __launch_bounds__(kThreads)
    place_routes(RouteList list, std::int32_t* place, std::int32_t* counts) {
  __shared__ int of_warp[kWarps];
  const int rank = static_cast<int>(blockIdx.x), warp = static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32;
  int placed = 0;
  for (std::int64_t first = 0; first < list.routes; first += kThreads) {
    const std::int64_t route = first + threadIdx.x;
    const bool mine = route < list.routes && rank_of(list, route) == rank;
    const unsigned those = __ballot_sync(~0u, mine);
    if (lane == 0) of_warp[warp] = __popc(those);
    __syncthreads();
    int before = placed;
    for (int other = 0; other < kWarps; ++other) {
      if (other < warp) before += of_warp[other];
      placed += of_warp[other];
    }
    if (mine) place[route] = before + __popc(those & ((1u << lane) - 1));
    __syncthreads();
  }
  if (threadIdx.x == 0) counts[rank] = placed;
}

// A block takes routes in turn.
__global__ void __launch_bounds__(kCopying)
    gather(RouteList list, const std::int32_t* place, const std::int32_t* counts, const std::byte* tokens,
           std::byte* to, std::int64_t row_bytes) {
  for (std::int64_t route = blockIdx.x; route < list.routes; route += gridDim.x) {
    const int rank = rank_of(list, route);
    if (rank < 0) continue;
    std::int64_t row = place[route];
    for (int lower = 0; lower < rank; ++lower) row += counts[lower];
    const auto* source = reinterpret_cast<const int4*>(tokens + route / list.top_k * row_bytes);
    auto* target = reinterpret_cast<int4*>(to + row * row_bytes);
    for (std::int64_t unit = threadIdx.x; unit < row_bytes / 16; unit += blockDim.x)
      target[unit] = source[unit];
  }
}

}  // namespace

void sort_routes(const RouteList& list, std::int32_t* place, std::int32_t* counts, cudaStream_t stream) {
  place_routes<<<static_cast<unsigned>(list.ranks), kThreads, 0, stream>>>(list, place, counts);
  cuda::check(cudaGetLastError(), "launch a kernel that sorts routes");
}

void gather_rows(const RouteList& list, const std::int32_t* place, const std::int32_t* counts,
                 const std::byte* tokens, std::byte* to, std::int64_t row_bytes, cudaStream_t stream) {
  if (list.routes == 0) return;
  const auto blocks = static_cast<unsigned>(std::min(list.routes, kMostBlocks));
  gather<<<blocks, kCopying, 0, stream>>>(list, place, counts, tokens, to, row_bytes);
  cuda::check(cudaGetLastError(), "launch a kernel that gathers rows");
}

}  // namespace ferry::app
