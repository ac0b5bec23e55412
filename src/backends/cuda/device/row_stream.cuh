// Row streams: a warp's pipeline of asynchronous loads into shared memory. The next pieces of rows are loaded
// while the warp stores the current one.
//
// By take() and take_address() every thread reads only bytes that it has loaded itself, so no thread waits
// for another; by take_shared() it may read those of the whole warp. Registers would hold too few bytes in
// flight to keep the link busy when few multiprocessors work, and would leave the warp none for other values.
#pragma once

#include <cstdint>

#include "backends/cuda/device/ptx.cuh"
#include "backends/cuda/device/row_copy.cuh"

namespace ferry::cuda {

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
