// Rows on their way through shared memory: a warp asks for the next pieces of rows while it stores this one.
//
// Every thread reads what it has asked for itself, so that nobody waits for anybody. What would take most of
// a warp's registers, and still be too little on its way where few multiprocessors work, waits in shared
// memory.
#pragma once

#include <cstdint>

#include "backends/cuda/device/ptx.cuh"
#include "backends/cuda/dispatch/row_copy.cuh"

namespace ferry::cuda {

// A warp's stream of pieces of kGranules granules, kStages of them on their way or in use. What comes next is
// asked of `Rows`, which is ahead of those who take:
//   bool Rows::open(const std::byte** row, ByteRange* range)   the next range with bytes; false: none is left
template <class Rows, int kGranules, int kStages>
struct PieceStream {
  using Piece = Granules<kGranules>;
  static constexpr int kPiece = kGranules * kGranule;
  static constexpr int kBytes = kStages * kPiece;  // of a warp's shared memory

  std::byte* memory;  // kBytes, shared
  Rows rows;
  const std::byte* row = nullptr;  // being asked for
  ByteRange range{0, 0};
  int asked = 0, taken = 0;  // stages, modulo kStages

  // Asks for the first pieces.
  __device__ __forceinline__ void start() {
    open();
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) ask();
  }
  // The same where a stream of the same rows has been started before, and is used no more.
  __device__ __forceinline__ void resume() {
    open();
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) pass();
  }
  // The next piece, in the order asked for: its granules, or where they lie. A thread finds its own there.
  __device__ __forceinline__ Piece take() {
    const std::byte* mine = take_where() + Piece::offset(0);
    Piece piece;
#pragma unroll
    for (int g = 0; g < kGranules; ++g) piece.held[g] = *reinterpret_cast<const uint4*>(mine + g * kGranule);
    return piece;
  }
  __device__ __forceinline__ const std::byte* take_where() {
    ask();
    wait_async_but<kStages - 1>();
    const std::byte* piece = memory + taken * kPiece;
    taken = taken + 1 == kStages ? 0 : taken + 1;
    return piece;
  }

 private:
  __device__ __forceinline__ void open() {
    if (!rows.open(&row, &range)) row = nullptr;
  }
  __device__ __forceinline__ void pass() {
    if (row != nullptr) {
      range.begin += kPiece;
      if (range.begin >= range.end) open();
    }
    asked = asked + 1 == kStages ? 0 : asked + 1;
  }
  __device__ __forceinline__ void ask() {
    if (row != nullptr) {
      std::byte* mine = memory + asked * kPiece + Piece::offset(0);
      const int at = Piece::offset(range.begin);
#pragma unroll
      for (int g = 0; g < kGranules; ++g) {
        if (at + g * kGranule < range.end) load_async(mine + g * kGranule, row + at + g * kGranule);
      }
    }
    commit_async();
    pass();
  }
};

// Of whole rows that are moved.
template <class Rows>
using RowStream = PieceStream<Rows, 14, 3>;

}  // namespace ferry::cuda
