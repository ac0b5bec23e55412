#include "tools/ferry/run/gpu_expert_kernels.hpp"

#include <algorithm>

#include "backends/cuda/runtime/error.hpp"
#include "tools/ferry/run/grouped_experts.cuh"

namespace ferry::app {

namespace {

constexpr int kThreads = 256;
static_assert(kThreads == kProductThreads);  // launch() has one number
constexpr std::int64_t kMostBlocks = 4096;
constexpr std::int64_t kBlocksOfGroups = 512;  // the host does not know how many rows there are

// [block] Calls work(row, column) for all values; each block processes whole rows, gridDim.x rows apart.
template <class Work>
__device__ void for_each_value(std::int64_t rows, std::int64_t columns, Work work) {
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    for (std::int64_t column = threadIdx.x; column < columns; column += blockDim.x) work(row, column);
  }
}

__global__ void __launch_bounds__(kThreads)
    gather_kernel(GpuRows rows, const std::int32_t* from, std::int64_t count, void* to) {
  for_each_value(count, rows.hidden, [&](std::int64_t i, std::int64_t column) {
    const std::int64_t row = from == nullptr ? i : from[i];
    store(rows.type, to, i * rows.hidden + column, value_of(rows, row, column));
  });
}

__global__ void __launch_bounds__(kThreads)
    scale_and_sum_kernel(GpuRows rows, GpuSlots slots, const float* factors, std::int64_t count, void* to) {
  for_each_value(count, rows.hidden, [&](std::int64_t row, std::int64_t column) {
    const float x = value_of(rows, row, column);
    float sum = 0;
    for (std::int64_t slot = row * slots.top_k; slot < (row + 1) * slots.top_k; ++slot) {
      const std::int32_t local = slots.local_ids[slot];
      if (local < 0) continue;
      sum = fmaf(slots.weights[slot], cuda::rounded(rows.type, x * factors[local]), sum);
    }
    store(rows.type, to, row * rows.hidden + column, sum);
  });
}

__global__ void __launch_bounds__(kThreads)
    sum_kernel(GpuRows rows, GpuSlots slots, const void* v, const std::int32_t* route_of_slot,
               std::int64_t count, void* to) {
  for_each_value(count, rows.hidden, [&](std::int64_t row, std::int64_t column) {
    float sum = 0;
    for (std::int64_t slot = row * slots.top_k; slot < (row + 1) * slots.top_k; ++slot) {
      if (route_of_slot[slot] < 0) continue;
      sum = fmaf(slots.weights[slot], load(rows.type, v, route_of_slot[slot] * rows.hidden + column), sum);
    }
    store(rows.type, to, row * rows.hidden + column, sum);
  });
}

__global__ void __launch_bounds__(kThreads)
    silu_times_kernel(const float* gate, const float* up, std::int64_t count, DType type, void* to) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step)
    store(type, to, i, gate[i] / (1.0F + expf(-gate[i])) * up[i]);
}

__global__ void __launch_bounds__(kThreads)
    scale_groups_kernel(GpuRows rows, GpuGroups groups, const float* factors, void* to) {
  scale_rows_of_groups(rows, groups, factors, to);
}

__global__ void __launch_bounds__(kProductThreads)
    gate_and_up_kernel(GpuRows rows, GpuGroups groups, GpuSwiglu swiglu) {
  __shared__ ProductMemory memory;
  gate_and_up(rows, groups, swiglu, &memory);
}

__global__ void __launch_bounds__(kProductThreads)
    down_kernel(GpuRows rows, GpuGroups groups, GpuSwiglu swiglu, void* to) {
  __shared__ ProductMemory memory;
  down(rows, groups, swiglu, to, &memory);
}

// Launches `kernel` unless there is nothing to do.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), std::int64_t blocks, cudaStream_t stream, Arguments... arguments) {
  if (blocks == 0) return;
  kernel<<<static_cast<unsigned>(std::min(blocks, kMostBlocks)), kThreads, 0, stream>>>(arguments...);
  cuda::check(cudaGetLastError(), "launch a kernel of the experts");
}

}  // namespace

void gather_values(const GpuRows& rows, const std::int32_t* from, std::int64_t count, void* to,
                   cudaStream_t stream) {
  launch(gather_kernel, count, stream, rows, from, count, to);
}

void scale_groups(const GpuRows& rows, const GpuGroups& groups, const float* factors, void* to,
                  cudaStream_t stream) {
  launch(scale_groups_kernel, kBlocksOfGroups, stream, rows, groups, factors, to);
}

void swiglu_groups(const GpuRows& rows, const GpuGroups& groups, const GpuSwiglu& swiglu, void* to,
                   cudaStream_t stream) {
  launch(gate_and_up_kernel, kBlocksOfGroups, stream, rows, groups, swiglu);
  launch(down_kernel, kBlocksOfGroups, stream, rows, groups, swiglu, to);
}

void scale_and_sum_slots(const GpuRows& rows, const GpuSlots& slots, const float* factors, std::int64_t count,
                         void* to, cudaStream_t stream) {
  launch(scale_and_sum_kernel, count, stream, rows, slots, factors, count, to);
}

void sum_slots(const GpuRows& rows, const GpuSlots& slots, const void* v, const std::int32_t* route_of_slot,
               std::int64_t count, void* to, cudaStream_t stream) {
  launch(sum_kernel, count, stream, rows, slots, v, route_of_slot, count, to);
}

void silu_times(const float* gate, const float* up, std::int64_t count, DType type, void* to,
                cudaStream_t stream) {
  launch(silu_times_kernel, (count + kThreads - 1) / kThreads, stream, gate, up, count, type, to);
}

}  // namespace ferry::app
