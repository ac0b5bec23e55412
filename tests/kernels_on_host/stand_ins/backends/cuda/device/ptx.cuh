// Stands in for src/backends/cuda/device/ptx.cuh where a fiber is a thread.
#pragma once

#include <bit>

#include "format/bf16.hpp"
#include "format/fp16.hpp"
#include "kernels_on_host/cuda_on_grid.hpp"
#include "protocol/on_host/ptx_functions.hpp"

namespace ferry::cuda {

inline std::uint32_t two_to_bf16(float low, float high) {
  return fp32_to_bf16(low) | std::uint32_t{fp32_to_bf16(high)} << 16;
}
inline std::uint32_t two_to_fp16(float low, float high) {
  return fp32_to_fp16(low) | std::uint32_t{fp32_to_fp16(high)} << 16;
}
inline float value_of_fp16(std::uint16_t bits) {
  return fp16_value(bits);
}

}  // namespace ferry::cuda
