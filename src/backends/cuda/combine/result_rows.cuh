// Stores of a token's result, also where the result is the call's residual.
#pragma once

#include "backends/cuda/combine/combine_traits.cuh"
#include "backends/cuda/combine/row_sums.cuh"
#include "backends/cuda/device/values.cuh"

namespace ferry::cuda::inline FERRY_WIDTH {

__device__ __forceinline__ std::byte* result_row(const CombineArguments& call, std::int64_t row) {
  return call.result + row * call.result_stride;
}

// Whether the result is added to: only generic kernels run such calls.
template <class Traits>
__device__ __forceinline__ bool adds_to_result(const CombineArguments& call) {
  if constexpr (Traits::kSpecialised) return false;
  return call.adds_to_result;
}

// [thread] Stores computed values to `row` of the result, from `column` on, or adds them: then each value may
// be stored only once. This thread alone accesses them.
template <class Traits, int kCount>
__device__ __forceinline__ void store_result(const CombineArguments& call, DType type, std::byte* row,
                                             std::int64_t column, const float (&value)[kCount]) {
  if (!adds_to_result<Traits>(call)) return store_values(type, row, column, value);
  float sum[kCount];
  if constexpr (kCount == 8) {
    unpack(type, load_eight(type, row, column), sum);
  } else {
    load_four(type, row, column, sum);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i] = __fmaf_rn(call.scale, rounded(type, value[i]), sum[i]);
  store_values(type, row, column, sum);
}

// [warp] The piece of a token's sum from column `first` on.
template <class Traits, DType kType>
__device__ __forceinline__ void store_results(const CombineArguments& call, DType type, std::int64_t token,
                                              int first, int end, const PieceSums<kType>& sum) {
#pragma unroll
  for (int d = 0; d < kPieceAccesses; ++d) {
    const int column = PieceColumns<kType>::column(first, d);
    if (column < end) store_result<Traits>(call, type, result_row(call, token), column, sum[d]);
  }
}

}  // namespace ferry::cuda::inline FERRY_WIDTH
