// Sums of rows in registers: by one warp, a few columns at a time, several rows on their way at once.
#pragma once

#include "cuda/row_copy.cuh"
#include "cuda/values.cuh"

namespace ferry::cuda {

inline constexpr int kDeep = 4;        // accesses of 16 bytes by each thread
inline constexpr int kRowsAtOnce = 2;  // on their way

// Columns of a row that some quarters are, the same whatever the values' type.
struct Columns {
  int begin, end;
};
__device__ inline Columns columns_of(const Quarters& quarters, int hidden) {
  const ByteRange range = ByteRange::of(quarters, hidden, 256);
  return {range.begin, range.end};
}

// kDeep accesses of a row by each thread, from byte `at` on.
template <DType kType>
struct Piece {
  static constexpr int kValues = kPerAccess<kType>;
  static constexpr int kColumns = 32 * kDeep * kValues;

  uint4 raw[kDeep];

  __device__ __forceinline__ static int column(int first, int d) {
    return first + kValues * (32 * d + static_cast<int>(threadIdx.x % 32));
  }
  __device__ __forceinline__ void load(const std::byte* row, int first, int end) {
    const std::byte* from = row + column(first, 0) * value_bytes(kType);
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      if (column(first, d) < end) raw[d] = *reinterpret_cast<const uint4*>(from + kGranule * d);
    }
  }
  // Of computed values: rounded to the type, as they would have traveled.
  __device__ __forceinline__ void pack(const float (&value)[kDeep][kValues]) {
#pragma unroll
    for (int d = 0; d < kDeep; ++d) raw[d] = packed<kType>(value[d]);
  }
};

template <DType kType>
using Sums = float[kDeep][kPerAccess<kType>];

__device__ __forceinline__ const std::byte* row_of(const std::byte* mine, int thread) {
  return reinterpret_cast<const std::byte*>(
      __shfl_sync(~0u, reinterpret_cast<unsigned long long>(mine), thread));
}

// Calls use(piece, thread) for the row of each thread in `threads`, ascending; some are on their way at once.
template <DType kType, class Use>
__device__ __forceinline__ void each_piece(const std::byte* mine, std::uint32_t threads, int first, int end,
                                           Use use) {
#pragma unroll 1
  while (threads != 0) {
    Piece<kType> piece[kRowsAtOnce];
    int of[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i, threads &= threads - 1) {
      of[i] = __ffs(static_cast<int>(threads)) - 1;
      if (threads != 0) piece[i].load(row_of(mine, of[i]), first, end);
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (of[i] >= 0) use(piece[i], of[i]);
    }
  }
}

// sum = fma(weight, v, sum) over the rows of the threads in `threads`; `weight`: of this thread's row. v is
// rounded to the wire type.
template <DType kType>
__device__ __forceinline__ void add_weighed(const std::byte* mine, std::uint32_t threads, float weight,
                                            DType wire, int first, int end, Sums<kType>& sum) {
  each_piece<kType>(mine, threads, first, end, [&](const Piece<kType>& piece, int thread) {
    const float w = __shfl_sync(~0u, weight, thread);
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      float value[kPerAccess<kType>];
      unpack<kType>(piece.raw[d], value);
#pragma unroll
      for (int i = 0; i < kPerAccess<kType>; ++i) {
        const float v = kType == wire ? value[i] : rounded(wire, value[i]);
        sum[d][i] = __fmaf_rn(w, v, sum[d][i]);
      }
    }
  });
}

template <DType kType>
__device__ __forceinline__ void add_piece(const Piece<kType>& piece, Sums<kType>& sum) {
#pragma unroll
  for (int d = 0; d < kDeep; ++d) {
    float value[kPerAccess<kType>];
    unpack<kType>(piece.raw[d], value);
#pragma unroll
    for (int i = 0; i < kPerAccess<kType>; ++i) sum[d][i] = __fadd_rn(sum[d][i], value[i]);
  }
}

// sum = sum + v over the rows of the threads in `threads`.
template <DType kType>
__device__ __forceinline__ void add_rows(const std::byte* mine, std::uint32_t threads, int first, int end,
                                         Sums<kType>& sum) {
  each_piece<kType>(mine, threads, first, end,
                    [&](const Piece<kType>& piece, int) { add_piece(piece, sum); });
}

template <DType kType>
__device__ __forceinline__ void store_sums(DType type, std::byte* to, int first, int end,
                                           const Sums<kType>& sum) {
#pragma unroll
  for (int d = 0; d < kDeep; ++d) {
    const int column = Piece<kType>::column(first, d);
    if (column < end) store_values(type, to, column, sum[d]);
  }
}

// A piece to row `to` of type `type`; moved if it has it.
template <DType kType>
__device__ __forceinline__ void store_piece(const Piece<kType>& piece, DType type, std::byte* to, int first,
                                            int end) {
#pragma unroll
  for (int d = 0; d < kDeep; ++d) {
    const int column = Piece<kType>::column(first, d);
    if (column >= end) continue;
    if (type == kType) {
      *reinterpret_cast<uint4*>(to + column * value_bytes(kType)) = piece.raw[d];
      continue;
    }
    float value[kPerAccess<kType>];
    unpack<kType>(piece.raw[d], value);
    store_values(type, to, column, value);
  }
}

}  // namespace ferry::cuda
