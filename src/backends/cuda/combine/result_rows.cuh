// The end of a token's sum: rows of shared experts, which are added last, and stores of the result, also
// where it is the call's residual. Shared rows lie on the token's own rank, so nothing is awaited.
#pragma once

#include "backends/cuda/combine/combine_traits.cuh"
#include "backends/cuda/combine/row_sums.cuh"
#include "backends/cuda/device/values.cuh"
#include "backends/cuda/dispatch/shared_positions.cuh"

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

// The rows of shared experts among the terms of one token. Specialised kernels stream them behind the other
// rows; the generic ones, which most calls use without shared experts, load them when they add them.
template <class Traits>
struct SharedTerms {
  static constexpr bool kStreams = Traits::kShares && Traits::kSpecialised;

  const CombineArguments& call;
  const std::byte* row = nullptr;  // this thread's, or null
  std::uint32_t streamed = 0;      // threads whose row is in the stream, one bit each

  // [warp] `others`: threads, from the first on, that have other rows of the same set in the stream. The last
  // threads have the shared experts' rows (shared_terms_fit()).
  __device__ __forceinline__ SharedTerms(const CombineArguments& arguments, std::int32_t token, int others)
      : call(arguments) {
    if constexpr (kStreams) {
      const int first = others == 0 ? 0 : 32 - call.shared_terms,
                expert = static_cast<int>(threadIdx.x % 32) - first;
      if (expert >= 0 && expert < call.shared_terms) row = shared_row_of(call, expert, token);
      streamed = __ballot_sync(~0u, row != nullptr);
    } else {
      row = shared_rows_of_token<Traits>(call, token);
    }
  }

  __device__ __forceinline__ bool is_streamed() const {
    return kStreams && (streamed >> threadIdx.x % 32 & 1) != 0;
  }

  // [warp] sum += v over the columns of a piece, for each row in ascending order of the experts.
  template <DType kType>
  __device__ __forceinline__ void add(SumStream& stream, int first, int end, PieceSums<kType>& sum) const {
    if constexpr (kStreams) return add_rows<kType>(stream, streamed, sum);
    if constexpr (Traits::kShares) add_loaded<kType>(first, end, sum);
  }

 private:
  template <DType kType>
  __device__ __forceinline__ void add_loaded(int first, int end, PieceSums<kType>& sum) const {
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
};

}  // namespace ferry::cuda::inline FERRY_WIDTH
