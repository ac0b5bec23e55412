#include "tools/ferry/run/gpu_expert_kernels.hpp"

#include <algorithm>

#include "backends/cuda/device/values.cuh"
#include "backends/cuda/runtime/error.hpp"
#include "format/decode.hpp"

namespace ferry::app {

namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 4096;

__device__ float load(DType type, const void* values, std::int64_t index) {
  if (type == DType::fp32) return static_cast<const float*>(values)[index];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(values)[index];
  return type == DType::bf16 ? bf16_to_fp32(bits) : fp16_to_fp32(bits);
}

__device__ void store(DType type, void* values, std::int64_t index, float value) {
  if (type == DType::fp32) {
    static_cast<float*>(values)[index] = value;
  } else {
    static_cast<std::uint16_t*>(values)[index] =
        type == DType::bf16 ? fp32_to_bf16(value) : fp32_to_fp16(value);
  }
}

__device__ float value_of(const GpuRows& rows, std::int64_t row, std::int64_t column) {
  const Encoding& encoding = rows.encoding;
  if (!encoding.quantises()) return load(rows.type, rows.values, row * rows.hidden + column);
  const auto* codes = static_cast<const char*>(rows.values) + row * encoding.value_bytes(rows.hidden);
  const float scale = received_scale(encoding, rows.scale_part, rows.scales, rows.scale_leading, row,
                                     column / encoding.block);
  const float row_scale = rows.row_scales != nullptr ? rows.row_scales[row] : 1.0f;
  return quantised_element(encoding, codes, column) * (scale * row_scale);
}

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
    scale_kernel(GpuRows rows, std::int64_t first, std::int64_t count, float factor, void* to) {
  for_each_value(count, rows.hidden, [&](std::int64_t i, std::int64_t column) {
    const std::int64_t row = first + i;
    store(rows.type, to, row * rows.hidden + column, value_of(rows, row, column) * factor);
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

void scale_rows(const GpuRows& rows, std::int64_t first, std::int64_t count, float factor, void* to,
                cudaStream_t stream) {
  launch(scale_kernel, count, stream, rows, first, count, factor, to);
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
