// Adds the rows of shared experts, which come after all other terms of a token's sum. They lie on the token's
// own rank, so nothing is awaited.
#pragma once

#include "backends/cuda/combine/combine.hpp"
#include "backends/cuda/combine/row_sums.cuh"
#include "backends/cuda/dispatch/shared_positions.cuh"

namespace ferry::cuda {

// The row of shared expert `expert` for a token, in the combine type; null if it was dropped or another rank
// has it.
__device__ __forceinline__ const std::byte* shared_row_of(const CombineArguments& call, int expert,
                                                          std::int32_t token) {
  const PlanHeader& header = *call.plan.header;
  const std::int64_t row = shared_rows_of(call.lane, header.tokens).row(expert, token);
  if (row < 0 || row >= header.total) return nullptr;
  if (call.kept_shared_rows == nullptr) return call.outputs + row * call.output_stride;
  const std::int64_t row_bytes = call.lane.hidden * value_bytes(call.combine_type);
  return call.kept_shared_rows + (std::int64_t{expert} * header.tokens + token) * row_bytes;
}

// [warp] A token's rows: thread s has that of shared expert s. Null: none.
template <class Traits>
__device__ __forceinline__ const std::byte* shared_rows_of_token(const CombineArguments& call,
                                                                 std::int32_t token) {
  if constexpr (!Traits::kShares) return nullptr;
  const auto expert = static_cast<int>(threadIdx.x % 32);
  return expert < call.shared_terms ? shared_row_of(call, expert, token) : nullptr;
}

// [warp] sum += v over the columns of a piece, for each thread's row in ascending order. `row`: this
// thread's.
template <class Traits, DType kType>
__device__ __forceinline__ void add_shared_rows(const CombineArguments& call, const std::byte* row, int first,
                                                int end, PieceSums<kType>& sum) {
  if constexpr (!Traits::kShares) return;
  constexpr int kWidth = static_cast<int>(value_bytes(kType));
#pragma unroll 1
  for (int expert = 0; expert < call.shared_terms; ++expert) {
    const std::byte* const from = pointer_of(row, expert);
    if (from == nullptr) continue;
    uint4 loaded[kPieceAccesses] = {};
#pragma unroll
    for (int d = 0; d < kPieceAccesses; ++d) {
      const int column = PieceColumns<kType>::column(first, d);
      if (column < end) loaded[d] = *reinterpret_cast<const uint4*>(from + column * kWidth);
    }
#pragma unroll
    for (int d = 0; d < kPieceAccesses; ++d) add_access<kType>(loaded[d], sum[d]);
  }
}

}  // namespace ferry::cuda
