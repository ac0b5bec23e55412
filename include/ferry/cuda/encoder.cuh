// Makes an encoder (encoder.hpp) from a function object that encodes one row. For .cu files: nvcc compiles it
// into a kernel for rows in device memory and into a loop for rows in host memory, and nothing of it is in
// Ferry's library.
//
//   struct Truncate {  // the upper byte of each bf16 value
//     __host__ __device__ void operator()(const ferry::cuda::RowToEncode& row) const {
//       for (int c = row.thread; c < row.hidden; c += row.threads)
//         row.parts[0][c] = std::byte(__float_as_uint(row.value(c)) >> 24);
//     }
//   };
//   const ferry::Format format = ferry::register_format("truncate", ferry::cuda::make_encoder(
//       [](int hidden) { return std::array<std::int64_t, ferry::kMaxParts>{hidden}; }, Truncate{}));
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "ferry/encoder.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {

/// A row, as the function object gets it. On the device the 32 threads of a warp call it together for each
/// row, on the host one thread does.
struct RowToEncode {
  const void* values;  ///< [hidden] of `type`
  DType type;
  int hidden;
  std::int64_t index;           ///< of the token
  int thread, threads;          ///< this thread, and the threads that have the row
  std::byte* parts[kMaxParts];  ///< where the row's parts go; null: no such part

  __host__ __device__ float value(int column) const {
    if (type == DType::bf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(values)[column]);
    if (type == DType::fp16) return __half2float(static_cast<const __half*>(values)[column]);
    return static_cast<const float*>(values)[column];
  }
  /// The largest of the numbers that the row's threads have. All of them must call it.
  __host__ __device__ float largest(float mine) const {
#ifdef __CUDA_ARCH__
    for (int step = 16; step > 0; step /= 2) mine = fmaxf(mine, __shfl_xor_sync(~0u, mine, step));
#endif
    return mine;
  }
};

namespace detail {

inline constexpr int kEncodeThreads = 256;

// An EncoderCall without what device code cannot use.
struct RowsToEncode {
  const std::byte* tokens;
  std::int64_t stride;
  DType type;
  int hidden;
  std::int64_t rows;
  const std::int32_t* device_rows;
  std::byte* parts[kMaxParts];
  std::int64_t part_strides[kMaxParts];

  static RowsToEncode of(const EncoderCall& call) {
    RowsToEncode rows{static_cast<const std::byte*>(call.tokens),
                      call.stride,
                      call.type,
                      call.hidden,
                      call.rows,
                      call.device_rows,
                      {},
                      {}};
    for (std::size_t p = 0; p < call.parts.size(); ++p) {
      rows.parts[p] = static_cast<std::byte*>(call.parts[p]);
      rows.part_strides[p] = call.part_strides[p];
    }
    return rows;
  }
  __host__ __device__ RowToEncode row(std::int64_t index, int thread, int threads) const {
    RowToEncode row{tokens + index * stride, type, hidden, index, thread, threads, {}};
    for (int p = 0; p < kMaxParts; ++p)
      row.parts[p] = parts[p] == nullptr ? nullptr : parts[p] + index * part_strides[p];
    return row;
  }
};

template <class Encode>
__global__ void __launch_bounds__(kEncodeThreads) encode_rows(RowsToEncode call, Encode encode) {
  std::int64_t rows = call.rows;
  if (call.device_rows != nullptr && *call.device_rows < rows) rows = *call.device_rows;
  const std::int64_t warps = std::int64_t{gridDim.x} * (kEncodeThreads / 32);
  std::int64_t row = (std::int64_t{blockIdx.x} * kEncodeThreads + threadIdx.x) / 32;
  for (; row < rows; row += warps) encode(call.row(row, static_cast<int>(threadIdx.x % 32), 32));
}

}  // namespace detail

/// An encoder for rows in host and in device memory. `encode` is copied to the device;
/// `__host__ __device__ void operator()(const RowToEncode& row) const`.
template <class Encode>
Encoder make_encoder(std::function<std::array<std::int64_t, kMaxParts>(int)> part_bytes, Encode encode) {
  Encoder encoder;
  encoder.part_bytes = std::move(part_bytes);
  encoder.on_host = [encode](const EncoderCall& call) {
    const auto rows = detail::RowsToEncode::of(call);
    for (std::int64_t row = 0; row < call.rows; ++row) encode(rows.row(row, 0, 1));
  };
  encoder.on_device = [encode](const EncoderCall& call) {
    constexpr std::int64_t kRowsOfBlock = detail::kEncodeThreads / 32, kMostBlocks = 1024;
    const auto blocks = std::min((call.rows + kRowsOfBlock - 1) / kRowsOfBlock, kMostBlocks);
    detail::encode_rows<<<static_cast<unsigned>(blocks), detail::kEncodeThreads, 0,
                          static_cast<cudaStream_t>(call.stream.handle)>>>(detail::RowsToEncode::of(call),
                                                                           encode);
    if (const cudaError_t result = cudaGetLastError(); result != cudaSuccess)
      throw SystemError(std::string("launching an encoder: ") + cudaGetErrorString(result),
                        static_cast<int>(result));
  };
  return encoder;
}

}  // namespace ferry::cuda
