// How a warp moves rows: through registers in granules of 512 bytes, 16 bytes a thread, and in streams of
// asynchronous loads into shared memory.
#pragma once

#include <cstdint>

#include "backends/cuda/device/ptx.cuh"
#include "layout/device_signals.hpp"

namespace ferry::cuda {

inline constexpr int kGranule = 512;  // bytes

// [warp] The pointer that thread `thread` has.
template <class T>
__device__ __forceinline__ T* pointer_of(T* mine, int thread) {
  return reinterpret_cast<T*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(mine), thread));
}

// Quarters [first, last) of a row.
struct Quarters {
  int first, last;

  // The quarters of segment `segment` of 1 << log2_segments.
  __device__ static Quarters of(int segment, int log2_segments) {
    return {(kQuarters >> log2_segments) * segment, (kQuarters >> log2_segments) * (segment + 1)};
  }
  __device__ int count() const { return last - first; }
};

// Bytes [begin, end) of a row.
struct ByteRange {
  int begin, end;

  // The bytes of some quarters; quarters begin at multiples of `alignment`.
  __device__ __forceinline__ static ByteRange of(const Quarters& quarters, std::int64_t row_bytes,
                                                 int alignment) {
    const auto bytes = static_cast<int>(row_bytes);  // kMaxPartBytes at most
    const int quarter = (bytes + kQuarters * alignment - 1) / (kQuarters * alignment) * alignment;
    return {min(quarters.first * quarter, bytes), min(quarters.last * quarter, bytes)};
  }
};

// This thread's 16 bytes of each of kCount consecutive granules of a row.
template <int kCount>
struct Granules {
  uint4 held[kCount];

  __device__ __forceinline__ static int offset(int at) {
    return at + 16 * static_cast<int>(threadIdx.x % 32);
  }
  __device__ __forceinline__ void load(const std::byte* from, int at, int end) {
    const std::byte* mine = from + offset(at);
#pragma unroll
    for (int g = 0; g < kCount; ++g) {
      if (offset(at) + g * kGranule < end) held[g] = *reinterpret_cast<const uint4*>(mine + g * kGranule);
    }
  }
  __device__ __forceinline__ void store(std::byte* to, int at, int end) const {
    std::byte* mine = to + offset(at);
#pragma unroll
    for (int g = 0; g < kCount; ++g) {
      if (offset(at) + g * kGranule < end) *reinterpret_cast<uint4*>(mine + g * kGranule) = held[g];
    }
  }
};

// [warp] Loads bytes `range` of `from`, both ends multiples of 16, kAtOnce granules at a time, and calls
// store(granules, at) for each batch, which begins at byte `at`.
template <int kAtOnce, class Store>
__device__ __forceinline__ void copy_granules(const std::byte* from, const ByteRange& range, Store store) {
#pragma unroll 1
  for (int at = range.begin; at < range.end; at += kAtOnce * kGranule) {
    Granules<kAtOnce> granules;
    granules.load(from, at, range.end);
    store(granules, at);
  }
}

// Row streams: a warp's pipeline of asynchronous loads into shared memory. The next pieces of rows are loaded
// while the warp stores the current one.
//
// By take() and take_address() every thread reads only bytes that it has loaded itself, so no thread waits
// for another; by take_shared() it may read those of the whole warp. Registers would hold too few bytes in
// flight to keep the link busy when few multiprocessors work, and would leave the warp none for other values.
//
// kStages pieces of kGranules granules are in flight or in use. `Rows` names what to load, ahead of the
// consumer:
//   bool Rows::open(const std::byte** row, ByteRange* range)   the next range with bytes; false: the end
template <class Rows, int kGranules, int kStages>
struct PieceStream {
  using Piece = Granules<kGranules>;
  static constexpr int kPiece = kGranules * kGranule;  // bytes
  static constexpr int kBytes = kStages * kPiece;      // of shared memory for a warp

  std::byte* memory;  // [kBytes], shared
  Rows rows;
  const std::byte* row = nullptr;  // being loaded
  ByteRange range{0, 0};           // of it, still to load
  int load_stage = 0, use_stage = 0;

  // Issues the loads of the first pieces.
  __device__ __forceinline__ void start() {
    open();
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) load();
  }
  // As start(), when another stream of the same rows has issued the loads already. That stream is used no
  // more.
  __device__ __forceinline__ void resume() {
    open();
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) advance();
  }
  // The next piece, in the order of the loads: in registers, or its address. A thread finds its own bytes
  // there.
  __device__ __forceinline__ Piece take() {
    const std::byte* mine = take_address() + Piece::offset(0);
    Piece piece;
#pragma unroll
    for (int g = 0; g < kGranules; ++g) piece.held[g] = *reinterpret_cast<const uint4*>(mine + g * kGranule);
    return piece;
  }
  __device__ __forceinline__ const std::byte* take_address() {
    load();
    wait_async_but<kStages - 1>();
    const std::byte* piece = memory + use_stage * kPiece;
    use_stage = use_stage + 1 == kStages ? 0 : use_stage + 1;
    return piece;
  }
  // [warp] As take_address(), for threads that read what others have loaded: all of them have read the piece
  // before, whose memory is loaded anew, and all bytes of this one have arrived.
  __device__ __forceinline__ const std::byte* take_shared() {
    __syncwarp();
    const std::byte* const piece = take_address();
    __syncwarp();
    return piece;
  }
  // [warp] The piece after the one that was taken last, for the same threads. It is taken later.
  __device__ __forceinline__ const std::byte* peek_shared() {
    wait_async_but<kStages - 2>();
    __syncwarp();
    return memory + use_stage * kPiece;
  }

 private:
  __device__ __forceinline__ void open() {
    if (!rows.open(&row, &range)) row = nullptr;
  }
  __device__ __forceinline__ void advance() {
    if (row != nullptr) {
      range.begin += kPiece;
      if (range.begin >= range.end) open();
    }
    load_stage = load_stage + 1 == kStages ? 0 : load_stage + 1;
  }
  __device__ __forceinline__ void load() {
    if (row != nullptr) {
      std::byte* mine = memory + load_stage * kPiece + Piece::offset(0);
      const int at = Piece::offset(range.begin);
#pragma unroll
      for (int g = 0; g < kGranules; ++g) {
        if (at + g * kGranule < range.end) load_async(mine + g * kGranule, row + at + g * kGranule);
      }
    }
    commit_async();
    advance();
  }
};

// For rows that are moved.
template <class Rows>
using RowStream = PieceStream<Rows, 14, 3>;
inline constexpr int kStreamPiece = 14 * kGranule;  // bytes of its pieces

}  // namespace ferry::cuda
