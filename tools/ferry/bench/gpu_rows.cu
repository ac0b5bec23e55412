#include "tools/ferry/bench/gpu_rows.hpp"

#include <algorithm>

#include "backends/cuda/runtime/error.hpp"

namespace ferry::app {

namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 4096;
constexpr int kWord = 4;  // divides the bytes of every element of every part

// Each block copies whole rows.
__global__ void __launch_bounds__(kThreads)
    copy_row(const RowToken* positions, std::int64_t count, const std::byte* from, std::byte* to,
             std::int64_t row_bytes) {
  for (std::int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const auto* source = reinterpret_cast<const int4*>(from + positions[i].token * row_bytes);
    auto* target = reinterpret_cast<int4*>(to + positions[i].row * row_bytes);
    for (std::int64_t vector = threadIdx.x; vector < row_bytes / 16; vector += blockDim.x)
      target[vector] = source[vector];
  }
}

// [block] Whether one part of a row equals the expected bytes, for this thread's share of them.
__device__ bool same_part(const PartLayout& part, const std::byte* data, std::int64_t leading,
                          std::int64_t row, const std::byte* expected) {
  bool same = true;
  for (std::int64_t byte = kWord * threadIdx.x; byte < part.row_bytes; byte += kWord * blockDim.x) {
    const std::int64_t element = byte / part.element_bytes;
    const std::int64_t at = element_offset(part, row, element, leading) + byte - element * part.element_bytes;
    same = same && *reinterpret_cast<const std::uint32_t*>(data + at) ==
                       *reinterpret_cast<const std::uint32_t*>(expected + byte);
  }
  return same;
}

// Each block compares whole rows.
__global__ void __launch_bounds__(kThreads)
    compare_row(const RowToken* positions, std::int64_t count, const std::byte* messages, RowParts rows,
                WrongRows* wrong) {
  const std::int64_t message_bytes = wire_bytes(rows.parts);
  for (std::int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const std::byte* expected = messages + positions[i].token * message_bytes;
    bool same = true;
    for (int p = 0; p < rows.parts.count; ++p) {
      const PartLayout& part = rows.parts.part[p];
      const std::int64_t row = rows.groups.scale_row(part, positions[i].row, rows.leading[p]);
      same = same_part(part, static_cast<const std::byte*>(rows.data[p]), rows.leading[p], row, expected) &&
             same;
      expected += part.wire_bytes;
    }
    if (__syncthreads_and(same) != 0 || threadIdx.x != 0) continue;
    atomicAdd(&wrong->count, 1);
    atomicMin(&wrong->first, positions[i].row);
  }
}

unsigned blocks_for(std::int64_t rows) {
  return static_cast<unsigned>(std::min(rows, kMostBlocks));
}

constexpr int kSortWarps = 32, kSortThreads = 32 * kSortWarps;

__device__ int rank_of(const RouteList& list, std::int64_t route) {
  const std::int32_t id = list.ids[route];
  return id < 0 ? -1 : list.rank[id];
}

// One block per rank scans all routes: a prefix sum over the routes to its rank.
__global__ void __launch_bounds__(kSortThreads)
    sort_routes_kernel(RouteList list, std::int32_t* row_of_route, std::int32_t* counts) {
  __shared__ int warp_counts[kSortWarps];
  const int rank = static_cast<int>(blockIdx.x), warp = static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32;
  int found = 0;
  for (std::int64_t first = 0; first < list.routes; first += kSortThreads) {
    const std::int64_t route = first + threadIdx.x;
    const bool to_rank = route < list.routes && rank_of(list, route) == rank;
    const unsigned ballot = __ballot_sync(~0u, to_rank);
    if (lane == 0) warp_counts[warp] = __popc(ballot);
    __syncthreads();
    int before = found;
    for (int other = 0; other < kSortWarps; ++other) {
      if (other < warp) before += warp_counts[other];
      found += warp_counts[other];
    }
    if (to_rank) row_of_route[route] = before + __popc(ballot & ((1u << lane) - 1));
    __syncthreads();
  }
  if (threadIdx.x == 0) counts[rank] = found;
}

// Each block copies whole rows.
__global__ void __launch_bounds__(kThreads)
    gather_kernel(RouteList list, const std::int32_t* row_of_route, const std::int32_t* counts,
                  const std::byte* tokens, std::byte* to, std::int64_t row_bytes) {
  for (std::int64_t route = blockIdx.x; route < list.routes; route += gridDim.x) {
    const int rank = rank_of(list, route);
    if (rank < 0) continue;
    std::int64_t row = row_of_route[route];
    for (int lower = 0; lower < rank; ++lower) row += counts[lower];
    const auto* source = reinterpret_cast<const int4*>(tokens + route / list.top_k * row_bytes);
    auto* target = reinterpret_cast<int4*>(to + row * row_bytes);
    for (std::int64_t vector = threadIdx.x; vector < row_bytes / 16; vector += blockDim.x)
      target[vector] = source[vector];
  }
}

}  // namespace

void copy_rows(const RowToken* positions, std::int64_t count, const std::byte* from, std::byte* to,
               std::int64_t row_bytes, cudaStream_t stream) {
  if (count == 0) return;
  copy_row<<<blocks_for(count), kThreads, 0, stream>>>(positions, count, from, to, row_bytes);
  cuda::check(cudaGetLastError(), "launch a kernel that copies rows");
}

void count_wrong_rows(const RowToken* positions, std::int64_t count, const std::byte* messages,
                      const RowParts& rows, WrongRows* wrong, cudaStream_t stream) {
  if (count == 0) return;
  compare_row<<<blocks_for(count), kThreads, 0, stream>>>(positions, count, messages, rows, wrong);
  cuda::check(cudaGetLastError(), "launch a kernel that compares rows");
}

void sort_routes(const RouteList& list, std::int32_t* row_of_route, std::int32_t* counts,
                 cudaStream_t stream) {
  sort_routes_kernel<<<static_cast<unsigned>(list.ranks), kSortThreads, 0, stream>>>(list, row_of_route,
                                                                                     counts);
  cuda::check(cudaGetLastError(), "launch a kernel that sorts routes");
}

void gather_rows(const RouteList& list, const std::int32_t* row_of_route, const std::int32_t* counts,
                 const std::byte* tokens, std::byte* to, std::int64_t row_bytes, cudaStream_t stream) {
  if (list.routes == 0) return;
  const auto blocks = blocks_for(list.routes);
  gather_kernel<<<blocks, kThreads, 0, stream>>>(list, row_of_route, counts, tokens, to, row_bytes);
  cuda::check(cudaGetLastError(), "launch a kernel that gathers rows");
}

}  // namespace ferry::app
