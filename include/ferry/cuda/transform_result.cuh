// Applies a function of the caller's to every value of a combine's result, on the GPU. For .cu files: nvcc
// compiles the function into a kernel of its own, and nothing of it is in Ferry's library.
//
//   struct AddBias {
//     const float* bias;
//     __device__ float operator()(float y, std::int64_t row, int column) const { return y + bias[column]; }
//   };
//   exchange.combine(outputs, plan, result, {.call = {.stream = {stream}}, .row_weights = weights});
//   ferry::cuda::transform_result(result, tokens, hidden, AddBias{bias}, stream);
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ferry/exchange.hpp"
#include "ferry/types.hpp"

namespace ferry::cuda {
namespace detail {

inline constexpr int kTransformThreads = 256;

__device__ inline float to_fp32(float value) {
  return value;
}
__device__ inline float to_fp32(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
__device__ inline float to_fp32(__half value) {
  return __half2float(value);
}
__device__ inline void store_rounded(float value, float* to) {
  *to = value;
}
__device__ inline void store_rounded(float value, __nv_bfloat16* to) {
  *to = __float2bfloat16_rn(value);
}
__device__ inline void store_rounded(float value, __half* to) {
  *to = __float2half_rn(value);
}

// Each block takes a row at a time, each thread 16 bytes of it.
template <class Value, class Function>
__global__ void __launch_bounds__(kTransformThreads)
    transform_rows(std::byte* data, std::int64_t stride, std::int64_t rows, const std::int32_t* device_rows,
                   int hidden, Function function) {
  constexpr int kValues = 16 / sizeof(Value);
  struct alignas(16) Vector {
    Value value[kValues];
  };
  if (device_rows != nullptr) rows = std::int64_t{*device_rows} < rows ? std::int64_t{*device_rows} : rows;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    auto* const vectors = reinterpret_cast<Vector*>(data + row * stride);
    for (int i = static_cast<int>(threadIdx.x); i < hidden / kValues; i += kTransformThreads) {
      Vector vector = vectors[i];
#pragma unroll
      for (int v = 0; v < kValues; ++v)
        store_rounded(function(to_fp32(vector.value[v]), row, i * kValues + v), &vector.value[v]);
      vectors[i] = vector;
    }
  }
}

}  // namespace detail

/// Replaces each value y of `result` by function(y, row, column), computed in fp32 and rounded to the
/// result's type. Enqueues one kernel behind what is on the stream, so it can be captured into a graph. After
/// a combine that has ended with an error it changes what the memory holds.
///
/// @param result  of the combine before it: address and stride are multiples of 16 bytes
/// @param rows  N; of an unreduced result N * K
/// @param hidden  columns; a row is a multiple of 16 bytes
/// @param function  copied to the device; `float operator()(float y, std::int64_t row, int column) const`
/// @param device_rows  if given, the number of rows is read from here when the kernel runs, and is `rows` at
/// most
/// @param blocks  most thread blocks; 0: one for each row, up to 1,024
template <class Function>
cudaError_t transform_result(const Result& result, std::int64_t rows, int hidden, Function function,
                             cudaStream_t stream, const std::int32_t* device_rows = nullptr, int blocks = 0) {
  if (rows == 0) return cudaSuccess;
  constexpr int kMostBlocks = 1024;
  const auto grid = static_cast<unsigned>(std::min<std::int64_t>(rows, blocks > 0 ? blocks : kMostBlocks));
  auto* const data = static_cast<std::byte*>(result.data);
  const std::int64_t stride = result.stride != 0 ? result.stride : hidden * bytes_of(result.type);
  const auto launch = [&](auto value) {
    using Value = decltype(value);
    detail::transform_rows<Value>
        <<<grid, detail::kTransformThreads, 0, stream>>>(data, stride, rows, device_rows, hidden, function);
  };
  switch (result.type) {
    case DType::bf16:
      launch(__nv_bfloat16{});
      break;
    case DType::fp16:
      launch(__half{});
      break;
    case DType::fp32:
      launch(float{});
      break;
  }
  return cudaGetLastError();
}

}  // namespace ferry::cuda
