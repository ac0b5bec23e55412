// Weighted and plain sums of rows in registers: one warp sums a piece of kPieceAccesses accesses at a time,
// while asynchronous copies bring the next pieces into shared memory.
#pragma once

#include "backends/cuda/device/row_copy.cuh"
#include "backends/cuda/device/values.cuh"
#include "backends/cuda/dispatch/send_partition.hpp"

namespace ferry::cuda {

inline constexpr int kPieceAccesses =
    7;  // 16-byte accesses of each thread in a piece: a quarter of 7,168 16-bit values

// Columns [begin, end) of a row.
struct Columns {
  int begin, end;
};
// The columns of some quarters; the same for every element type, so that ranks with different types agree.
__device__ inline Columns columns_of(const Quarters& quarters, int hidden) {
  const ByteRange range = ByteRange::of(quarters, hidden, 256);
  return {range.begin, range.end};
}

inline constexpr int kMaxSplits = kLog2Quarters + 3;  // where tokens are few: 32 slices of a row

// The slice of a token's row that a warp reduces. Where tokens are few, slices are smaller than a quarter:
// the warps of a quarter all wait for its flag, unless the sums arrive in LL packets.
struct RowSlice {
  Quarters quarters;  // of the row, in which the columns lie
  Columns columns;
  bool first;  // this warp also handles the values beside the row

  // Slice `slice` of 1 << splits.
  __device__ __forceinline__ static RowSlice of(int slice, int splits, int hidden) {
    const int finer = max(splits - kLog2Quarters, 0);
    const Quarters quarters = Quarters::of(slice >> finer, splits - finer);
    const Columns all = columns_of(quarters, hidden);
    if (finer == 0) return {quarters, all, slice == 0};
    const int part = slice & ((1 << finer) - 1), granularity = 256 << finer,
              columns = (all.end - all.begin + granularity - 1) / granularity * 256;
    return {quarters,
            {min(all.begin + part * columns, all.end), min(all.begin + (part + 1) * columns, all.end)},
            slice == 0};
  }
};

// The columns of a piece: kPieceAccesses accesses, each of consecutive columns over the warp's threads.
template <DType kType>
struct PieceColumns {
  static constexpr int kValues = kPerAccess<kType>;
  static constexpr int kColumns = 32 * kPieceAccesses * kValues;

  // First column of this thread's access `d` in the piece that starts at column `first`.
  __device__ __forceinline__ static int column(int first, int d) {
    return first + kValues * (32 * d + static_cast<int>(threadIdx.x % 32));
  }
};

// A piece in shared memory, as copied from the row.
struct LoadedPiece {
  const std::byte* mine;  // this thread's accesses

  __device__ __forceinline__ uint4 raw(int d) const {
    return *reinterpret_cast<const uint4*>(mine + kGranule * d);
  }
};
// A piece of computed values in registers, rounded to the type in which they are sent.
struct PackedPiece {
  uint4 held[kPieceAccesses];

  __device__ __forceinline__ uint4 raw(int d) const { return held[d]; }
};

template <DType kType>
using PieceSums = float[kPieceAccesses][kPerAccess<kType>];

// The rows that a warp sums, as the source of a PieceStream. Each thread holds a row of set A and one of set
// B. For each piece: the rows of the threads in `threads_a` (one bit each, ascending), then those in
// `threads_b`.
struct SummedRows {
  const std::byte *row_a, *row_b;  // this thread's rows
  std::uint32_t threads_a, threads_b;
  ByteRange range;
  std::uint32_t left_a = threads_a, left_b = threads_b;

  __device__ __forceinline__ bool open(const std::byte** row, ByteRange* piece) {
    if ((left_a | left_b) == 0) {
      range.begin += kPieceAccesses * kGranule;
      left_a = threads_a;
      left_b = threads_b;
    }
    if (range.begin >= range.end || (left_a | left_b) == 0) return false;
    const bool is_a = left_a != 0;
    *row = pointer_of(is_a ? row_a : row_b, __ffs(static_cast<int>(is_a ? left_a : left_b)) - 1);
    if (is_a) {
      left_a &= left_a - 1;
    } else {
      left_b &= left_b - 1;
    }
    *piece = {range.begin, min(range.begin + kPieceAccesses * kGranule, range.end)};
    return true;
  }
};
using SumStream = PieceStream<SummedRows, kPieceAccesses, 5>;

// [warp] Starts a stream of the rows' `columns`; its first pieces are requested. `memory`: kBytes of shared
// memory. `width`: bytes of an element.
__device__ __forceinline__ SumStream open_sum_stream(std::byte* memory, const Columns& columns, int width,
                                                     const std::byte* row_a, std::uint32_t threads_a,
                                                     const std::byte* row_b = nullptr,
                                                     std::uint32_t threads_b = 0) {
  SumStream stream{memory,
                   {row_a, row_b, threads_a, threads_b, {columns.begin * width, columns.end * width}}};
  stream.start();
  return stream;
}

// [warp] Calls use(piece, thread) for the next piece of each thread's row in `threads`, ascending.
template <class Use>
__device__ __forceinline__ void for_each_piece(SumStream& stream, std::uint32_t threads, Use use) {
#pragma unroll 1
  for (; threads != 0; threads &= threads - 1)
    use(LoadedPiece{stream.take_address() + SumStream::Piece::offset(0)},
        __ffs(static_cast<int>(threads)) - 1);
}

// [warp] sum = fma(weight, v, sum) over the next piece of each row in `threads`. `weight`: of this thread's
// row. v is first rounded to `combine_type`, so that local rows give the same bits as rows that were sent.
template <DType kType>
__device__ __forceinline__ void add_weighted(SumStream& stream, std::uint32_t threads, float weight,
                                             DType combine_type, PieceSums<kType>& sum) {
  for_each_piece(stream, threads, [&](const LoadedPiece& piece, int thread) {
    const float w = __shfl_sync(~0u, weight, thread);
#pragma unroll
    for (int d = 0; d < kPieceAccesses; ++d) {
      float value[kPerAccess<kType>];
      unpack<kType>(piece.raw(d), value);
#pragma unroll
      for (int i = 0; i < kPerAccess<kType>; ++i) {
        const float v = kType == combine_type ? value[i] : rounded(combine_type, value[i]);
        sum[d][i] = __fmaf_rn(w, v, sum[d][i]);
      }
    }
  });
}

// [warp] add_weighted() from zero, rounded to kType. A single row of weight 1 is computed as 0 + v in its own
// type: the same bits, with fewer instructions.
template <DType kType>
__device__ __forceinline__ PackedPiece weighted_sum(SumStream& stream, std::uint32_t threads, float weight) {
  PackedPiece sum;
  const bool single = (threads & (threads - 1)) == 0 && (threads >> threadIdx.x % 32 & 1) != 0;
  if (__any_sync(~0u, single && weight == 1)) {
    for_each_piece(stream, threads, [&](const LoadedPiece& piece, int) {
#pragma unroll
      for (int d = 0; d < kPieceAccesses; ++d) sum.held[d] = zero_plus<kType>(piece.raw(d));
    });
    return sum;
  }
  PieceSums<kType> values = {};
  add_weighted<kType>(stream, threads, weight, kType, values);
#pragma unroll
  for (int d = 0; d < kPieceAccesses; ++d) sum.held[d] = packed<kType>(values[d]);
  return sum;
}

// sum += v for the values in 16 bytes.
template <DType kType>
__device__ __forceinline__ void add_access(const uint4& raw, float (&sum)[kPerAccess<kType>]) {
  float value[kPerAccess<kType>];
  unpack<kType>(raw, value);
#pragma unroll
  for (int i = 0; i < kPerAccess<kType>; ++i) sum[i] = __fadd_rn(sum[i], value[i]);
}

template <DType kType, class Piece>
__device__ __forceinline__ void add_piece(const Piece& piece, PieceSums<kType>& sum) {
#pragma unroll
  for (int d = 0; d < kPieceAccesses; ++d) add_access<kType>(piece.raw(d), sum[d]);
}

// [warp] sum += v over the next piece of each row in `threads`.
template <DType kType>
__device__ __forceinline__ void add_rows(SumStream& stream, std::uint32_t threads, PieceSums<kType>& sum) {
  for_each_piece(stream, threads, [&](const LoadedPiece& piece, int) { add_piece<kType>(piece, sum); });
}

template <DType kType>
__device__ __forceinline__ void store_sums(DType type, std::byte* to, int first, int end,
                                           const PieceSums<kType>& sum) {
#pragma unroll
  for (int d = 0; d < kPieceAccesses; ++d) {
    const int column = PieceColumns<kType>::column(first, d);
    if (column < end) store_values(type, to, column, sum[d]);
  }
}

// [warp] Stores a piece to row `to` of element type `type`, unchanged if the types are equal.
template <DType kType, class Piece>
__device__ __forceinline__ void store_piece(const Piece& piece, DType type, std::byte* to, int first,
                                            int end) {
#pragma unroll
  for (int d = 0; d < kPieceAccesses; ++d) {
    const int column = PieceColumns<kType>::column(first, d);
    if (column >= end) continue;
    if (type == kType) {
      *reinterpret_cast<uint4*>(to + column * value_bytes(kType)) = piece.raw(d);
      continue;
    }
    float value[kPerAccess<kType>];
    unpack<kType>(piece.raw(d), value);
    store_values(type, to, column, value);
  }
}

}  // namespace ferry::cuda
