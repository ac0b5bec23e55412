#include "backends/cuda/operations/memory_kernels.hpp"

#include <algorithm>
#include <cstddef>

namespace ferry::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 1024;  // about as many as the largest devices run at once
constexpr std::int64_t kStores = 4;         // of 16 bytes, for a thread: decides the number of blocks
constexpr std::int64_t kMostGuardBlocks = 64;

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

// Calls use(guard, row) for each row of this thread.
template <class Use>
__device__ void for_each_guard(const GuardedRows& rows, Use use) {
  const std::int64_t threads = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; row < rows.rows; row += threads)
    use(rows.first + row * rows.stride + rows.row_bytes, row);
}

__global__ void __launch_bounds__(kThreads) fill_kernel(const __grid_constant__ RowGuardArguments arguments) {
  for_each_guard(arguments.rows, [&](std::byte* guard, std::int64_t) {
    for (std::int64_t i = 0; i < arguments.rows.guard_bytes; ++i)
      guard[i] = static_cast<std::byte>(arguments.value);
  });
}

__global__ void __launch_bounds__(kThreads)
    check_kernel(const __grid_constant__ RowGuardArguments arguments) {
  for_each_guard(arguments.rows, [&](const std::byte* guard, std::int64_t row) {
    bool intact = true;
    for (std::int64_t i = 0; i < arguments.rows.guard_bytes; ++i)
      intact = intact && guard[i] == static_cast<std::byte>(arguments.value);
    if (!intact) atomicMax(arguments.written, number_of({arguments.part, row}));
  });
}

constexpr const char* kAction = "launch a look at guard bytes";
std::int64_t blocks_for(const RowGuardArguments& call, int) {
  return std::clamp<std::int64_t>((call.rows.rows + kThreads - 1) / kThreads, 1, kMostGuardBlocks);
}

}  // namespace

void clear(const MemoryRange& first, const MemoryRange& second, cudaStream_t stream) {
  if (first.bytes + second.bytes > 0) kClearKernel({{first, second}}, {}, {stream});
}

const Kernel<RowGuardArguments> kFillGuardsKernel{&fill_kernel, kThreads, kAction, blocks_for};
const Kernel<RowGuardArguments> kCheckGuardsKernel{&check_kernel, kThreads, kAction, blocks_for};

}  // namespace ferry::cuda
