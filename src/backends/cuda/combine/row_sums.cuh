// Sums of rows in registers: by one warp, a few columns at a time, several pieces on their way at once.
#pragma once

#include "backends/cuda/device/values.cuh"
#include "backends/cuda/dispatch/row_stream.cuh"

namespace ferry::cuda {

inline constexpr int kDeep = 7;  // accesses of 16 bytes by each thread: a quarter of 7,168 16-bit values

// Columns of a row that some quarters are, the same whatever the values' type.
struct Columns {
  int begin, end;
};
__device__ inline Columns columns_of(const Quarters& quarters, int hidden) {
  const ByteRange range = ByteRange::of(quarters, hidden, 256);
  return {range.begin, range.end};
}

// Which columns a thread has of a piece: kDeep accesses, all threads' first.
template <DType kType>
struct PieceColumns {
  static constexpr int kValues = kPerAccess<kType>;
  static constexpr int kColumns = 32 * kDeep * kValues;

  __device__ __forceinline__ static int column(int first, int d) {
    return first + kValues * (32 * d + static_cast<int>(threadIdx.x % 32));
  }
};

// A piece that has come, as it lies: this thread's accesses.
struct LoadedPiece {
  const std::byte* mine;

  __device__ __forceinline__ uint4 raw(int d) const {
    return *reinterpret_cast<const uint4*>(mine + kGranule * d);
  }
};
// Of computed values: rounded to the type, as they travel.
struct PackedPiece {
  uint4 held[kDeep];

  __device__ __forceinline__ uint4 raw(int d) const { return held[d]; }
};

template <DType kType>
using Sums = float[kDeep][kPerAccess<kType>];

// The rows that a warp adds up, for a stream: of each piece of columns, the rows of the threads in `threads`
// (one bit each), ascending, then those of other rows.
struct SummedRows {
  const std::byte *mine, *others;  // this thread's rows
  std::uint32_t threads, of_others;
  ByteRange range;
  std::uint32_t left = threads, others_left = of_others;

  __device__ __forceinline__ bool open(const std::byte** row, ByteRange* piece) {
    if ((left | others_left) == 0) {
      range.begin += kDeep * kGranule;
      left = threads;
      others_left = of_others;
    }
    if (range.begin >= range.end || (left | others_left) == 0) return false;
    const bool first = left != 0;
    *row = pointer_of(first ? mine : others, __ffs(static_cast<int>(first ? left : others_left)) - 1);
    if (first) {
      left &= left - 1;
    } else {
      others_left &= others_left - 1;
    }
    *piece = {range.begin, min(range.begin + kDeep * kGranule, range.end)};
    return true;
  }
};
using SumStream = PieceStream<SummedRows, kDeep, 5>;

// A stream of some columns of those rows, of a type of `width` bytes; some pieces are asked for.
__device__ __forceinline__ SumStream stream_of(std::byte* memory, const Columns& columns, int width,
                                               const std::byte* mine, std::uint32_t threads,
                                               const std::byte* others = nullptr,
                                               std::uint32_t of_others = 0) {
  SumStream stream{memory, {mine, others, threads, of_others, {columns.begin * width, columns.end * width}}};
  stream.start();
  return stream;
}

// Calls use(piece, thread) for the stream's next pieces, of the threads in `threads`.
template <class Use>
__device__ __forceinline__ void each_piece(SumStream& stream, std::uint32_t threads, Use use) {
#pragma unroll 1
  for (; threads != 0; threads &= threads - 1)
    use(LoadedPiece{stream.take_where() + SumStream::Piece::offset(0)}, __ffs(static_cast<int>(threads)) - 1);
}

// sum = fma(weight, v, sum) over the stream's next pieces, of the threads in `threads`; `weight`: of this
// thread's row. v is rounded to the wire type.
template <DType kType>
__device__ __forceinline__ void add_weighed(SumStream& stream, std::uint32_t threads, float weight,
                                            DType wire, Sums<kType>& sum) {
  each_piece(stream, threads, [&](const LoadedPiece& piece, int thread) {
    const float w = __shfl_sync(~0u, weight, thread);
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      float value[kPerAccess<kType>];
      unpack<kType>(piece.raw(d), value);
#pragma unroll
      for (int i = 0; i < kPerAccess<kType>; ++i) {
        const float v = kType == wire ? value[i] : rounded(wire, value[i]);
        sum[d][i] = __fmaf_rn(w, v, sum[d][i]);
      }
    }
  });
}

// What add_weighed() makes of 0, rounded. Where one row of weight 1 is all, that is 0 + v in its own type.
template <DType kType>
__device__ __forceinline__ PackedPiece sum_weighed(SumStream& stream, std::uint32_t threads, float weight) {
  PackedPiece sum;
  const bool one = (threads & (threads - 1)) == 0 && (threads >> threadIdx.x % 32 & 1) != 0;
  if (__any_sync(~0u, one && weight == 1)) {
    each_piece(stream, threads, [&](const LoadedPiece& piece, int) {
#pragma unroll
      for (int d = 0; d < kDeep; ++d) sum.held[d] = zero_plus<kType>(piece.raw(d));
    });
    return sum;
  }
  Sums<kType> values = {};
  add_weighed<kType>(stream, threads, weight, kType, values);
#pragma unroll
  for (int d = 0; d < kDeep; ++d) sum.held[d] = packed<kType>(values[d]);
  return sum;
}

// sum = sum + v of the values in 16 bytes.
template <DType kType>
__device__ __forceinline__ void add_access(const uint4& raw, float (&sum)[kPerAccess<kType>]) {
  float value[kPerAccess<kType>];
  unpack<kType>(raw, value);
#pragma unroll
  for (int i = 0; i < kPerAccess<kType>; ++i) sum[i] = __fadd_rn(sum[i], value[i]);
}

template <DType kType, class Piece>
__device__ __forceinline__ void add_piece(const Piece& piece, Sums<kType>& sum) {
#pragma unroll
  for (int d = 0; d < kDeep; ++d) add_access<kType>(piece.raw(d), sum[d]);
}

// sum = sum + v over the stream's next pieces, of the threads in `threads`.
template <DType kType>
__device__ __forceinline__ void add_rows(SumStream& stream, std::uint32_t threads, Sums<kType>& sum) {
  each_piece(stream, threads, [&](const LoadedPiece& piece, int) { add_piece<kType>(piece, sum); });
}

template <DType kType>
__device__ __forceinline__ void store_sums(DType type, std::byte* to, int first, int end,
                                           const Sums<kType>& sum) {
#pragma unroll
  for (int d = 0; d < kDeep; ++d) {
    const int column = PieceColumns<kType>::column(first, d);
    if (column < end) store_values(type, to, column, sum[d]);
  }
}

// A piece to row `to` of type `type`; moved if it has it.
template <DType kType, class Piece>
__device__ __forceinline__ void store_piece(const Piece& piece, DType type, std::byte* to, int first,
                                            int end) {
#pragma unroll
  for (int d = 0; d < kDeep; ++d) {
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
