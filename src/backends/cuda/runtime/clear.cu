#include <algorithm>
#include <cstddef>

#include "backends/cuda/runtime/clear.hpp"
#include "backends/cuda/runtime/launch.hpp"

namespace ferry::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 1024;  // about as many as the largest devices run at once
constexpr std::int64_t kStores = 4;         // of 16 bytes, for a thread: decides the number of blocks

struct ClearArguments {
  MemoryRange range[2];
};

__device__ void clear_range(const MemoryRange& range, std::int64_t thread, std::int64_t threads) {
  const std::int64_t quads = range.bytes / 16;
  for (std::int64_t i = thread; i < quads; i += threads) static_cast<uint4*>(range.data)[i] = uint4{};
  for (std::int64_t i = 16 * quads + thread; i < range.bytes; i += threads)
    static_cast<std::byte*>(range.data)[i] = std::byte{0};
}

__global__ void __launch_bounds__(kThreads) clear_kernel(const __grid_constant__ ClearArguments arguments) {
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (const MemoryRange& range : arguments.range)
    clear_range(range, thread, std::int64_t{gridDim.x} * kThreads);
}

const Kernel<ClearArguments> kClearKernel{
    &clear_kernel, kThreads, "launch a clear of device memory", [](const ClearArguments& call, int) {
      const std::int64_t bytes = call.range[0].bytes + call.range[1].bytes,
                         block_bytes = 16 * kStores * kThreads;
      return std::min((bytes + block_bytes - 1) / block_bytes, kMostBlocks);
    }};

}  // namespace

void clear(const MemoryRange& first, const MemoryRange& second, cudaStream_t stream) {
  if (first.bytes + second.bytes > 0) kClearKernel({{first, second}}, {}, {stream});
}

}  // namespace ferry::cuda
