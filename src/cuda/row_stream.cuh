// Rows on their way through shared memory: a warp asks for the next pieces of rows while it stores this one.
//
// Every thread reads what it has asked for itself, so that nobody waits for anybody. What would take most of
// a warp's registers, and still be too little on its way where few multiprocessors work, waits in shared
// memory.
#pragma once

#include <cstdint>

#include "cuda/ptx.cuh"
#include "cuda/row_copy.cuh"

namespace ferry::cuda {

inline constexpr int kPieceGranules = 14;  // of a piece
inline constexpr int kPiece = kPieceGranules * kGranule;
inline constexpr int kStages = 3;  // pieces of a warp on their way, one of them being stored
inline constexpr int kStreamBytes = kStages * kPiece;  // of a warp's shared memory

using StreamPiece = Granules<kPieceGranules>;

// A warp's stream of pieces. What comes next is asked of `Rows`, which is one step ahead of those who take:
//   bool Rows::open(const std::byte** row, ByteRange* range)   the next row with bytes; false: none is left
template <class Rows>
struct RowStream {
  std::byte* memory;  // kStreamBytes, shared
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
  // The next piece, in the order asked for.
  __device__ __forceinline__ StreamPiece take() {
    ask();
    wait_async_but<kStages - 1>();
    StreamPiece piece;
    const std::byte* mine = memory + taken * kPiece + StreamPiece::offset(0);
#pragma unroll
    for (int g = 0; g < kPieceGranules; ++g)
      piece.held[g] = *reinterpret_cast<const uint4*>(mine + g * kGranule);
    taken = taken + 1 == kStages ? 0 : taken + 1;
    return piece;
  }

 private:
  __device__ __forceinline__ void open() {
    if (!rows.open(&row, &range)) row = nullptr;
  }
  __device__ __forceinline__ void ask() {
    if (row != nullptr) {
      std::byte* mine = memory + asked * kPiece + StreamPiece::offset(0);
      const int at = StreamPiece::offset(range.begin);
#pragma unroll
      for (int g = 0; g < kPieceGranules; ++g) {
        if (at + g * kGranule < range.end) load_async(mine + g * kGranule, row + at + g * kGranule);
      }
      range.begin += kPiece;
      if (range.begin >= range.end) open();
    }
    asked = asked + 1 == kStages ? 0 : asked + 1;
    commit_async();
  }
};

}  // namespace ferry::cuda
