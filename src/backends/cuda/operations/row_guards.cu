#include "backends/cuda/operations/row_guards.hpp"

#include <algorithm>

namespace ferry::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 64;

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
  return std::clamp<std::int64_t>((call.rows.rows + kThreads - 1) / kThreads, 1, kMostBlocks);
}

}  // namespace

const Kernel<RowGuardArguments> kFillGuardsKernel{&fill_kernel, kThreads, kAction, blocks_for};
const Kernel<RowGuardArguments> kCheckGuardsKernel{&check_kernel, kThreads, kAction, blocks_for};

}  // namespace ferry::cuda
