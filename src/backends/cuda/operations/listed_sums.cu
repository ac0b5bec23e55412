#include "backends/cuda/operations/memory_kernels.hpp"

#include <algorithm>
#include <cstdint>

#include "backends/cuda/device/values.cuh"

namespace ferry::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostBlocks = 1024;  // about as many as the largest devices run at once

std::int64_t quads_of(const ListedSums& sums) {  // 16 bytes of the result
  return sums.count * sums.hidden * bytes_of(sums.type) / 16;
}

// [thread]
template <DType kType>
__device__ uint4 sum_of(const ListedSums& sums, std::int64_t token, std::int64_t quad,
                        std::int64_t row_quads) {
  float sum[kPerAccess<kType>] = {};
  for (int i = 0; i < sums.most; ++i) {
    const std::int32_t row = sums.terms[token * sums.most + i];
    if (row < 0) continue;
    float value[kPerAccess<kType>];
    unpack<kType>(static_cast<const uint4*>(sums.rows)[row * row_quads + quad], value);
#pragma unroll
    for (int column = 0; column < kPerAccess<kType>; ++column) sum[column] += value[column];
  }
  return packed<kType>(sum);
}

template <DType kType>
__device__ void add_rows(const ListedSums& sums) {
  const std::int64_t row_quads = sums.hidden / kPerAccess<kType>,
                     threads = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < sums.count * row_quads;
       i += threads)
    static_cast<uint4*>(sums.result)[i] = sum_of<kType>(sums, i / row_quads, i % row_quads, row_quads);
}

__global__ void __launch_bounds__(kThreads) listed_sums_kernel(const __grid_constant__ ListedSums sums) {
  switch (sums.type) {
    case DType::bf16:
      return add_rows<DType::bf16>(sums);
    case DType::fp16:
      return add_rows<DType::fp16>(sums);
    case DType::fp32:
      return add_rows<DType::fp32>(sums);
  }
}

}  // namespace

const Kernel<ListedSums> kListedSumsKernel{
    &listed_sums_kernel, kThreads, "add rows by their numbers", [](const ListedSums& sums, int) {
      return std::min((quads_of(sums) + kThreads - 1) / kThreads, kMostBlocks);
    }};

}  // namespace ferry::cuda
