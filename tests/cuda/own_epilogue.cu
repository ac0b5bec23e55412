#include "cuda/own_epilogue.hpp"

#include "ferry/cuda/transform_result.cuh"
#include "harness/require_success.hpp"

namespace ferry::contract {
namespace {

struct OwnEpilogue {
  const float* bias;

  __device__ float operator()(float y, std::int64_t row, int column) const {
    const float sum = (y + bias[column]) * 0.5f + static_cast<float>(row);
    return sum > 0 ? sum : 0;
  }
};

}  // namespace

void apply_own_epilogue(const Result& result, std::int64_t rows, int hidden, const float* bias,
                        const std::int32_t* device_rows, int blocks, cudaStream_t stream) {
  device::require_success(
      cuda::transform_result(result, rows, hidden, OwnEpilogue{bias}, stream, device_rows, blocks),
      "transform_result");
}

}  // namespace ferry::contract
