#include <algorithm>

#include "backends/cuda/host/error.hpp"
#include "tools/ferry/bench/gpu_rows.hpp"

namespace ferry::app {

namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 4096;
constexpr int kWord = 4;  // every element of every part is a multiple of it

// A block takes whole rows in turn.
__global__ void __launch_bounds__(kThreads)
    copy_row(const RowToken* positions, std::int64_t count, const std::byte* from, std::byte* to,
             std::int64_t row_bytes) {
  for (std::int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const auto* source = reinterpret_cast<const int4*>(from + positions[i].token * row_bytes);
    auto* target = reinterpret_cast<int4*>(to + positions[i].row * row_bytes);
    for (std::int64_t unit = threadIdx.x; unit < row_bytes / 16; unit += blockDim.x)
      target[unit] = source[unit];
  }
}

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

__global__ void __launch_bounds__(kThreads)
    compare_row(const RowToken* positions, std::int64_t count, const std::byte* messages, RowParts rows,
                WrongRows* wrong) {
  const std::int64_t message_bytes = wire_bytes(rows.parts);
  for (std::int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const std::byte* expected = messages + positions[i].token * message_bytes;
    bool same = true;
    for (int p = 0; p < rows.parts.count; ++p) {
      const PartLayout& part = rows.parts.part[p];
      same = same_part(part, static_cast<const std::byte*>(rows.data[p]), rows.leading[p], positions[i].row,
                       expected) &&
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

}  // namespace ferry::app
