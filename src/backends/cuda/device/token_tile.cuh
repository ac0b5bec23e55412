// Token tiles: a warp is cut into tiles of 8, 16 or 32 threads, and each tile works on one token, a thread
// for each of its slots (as a tiled partition of cooperative groups).
#pragma once

#include <cstdint>

namespace ferry::cuda {

struct TokenTile {
  int log2_size;  // the smallest of 8, 16 and 32 threads that has a thread for each of a token's slots

  __device__ static TokenTile of(int top_k) { return {top_k <= 8 ? 3 : top_k <= 16 ? 4 : 5}; }
  __device__ int size() const { return 1 << log2_size; }       // threads
  __device__ int per_warp() const { return 32 >> log2_size; }  // tiles, and so tokens, of a warp
  __device__ int index() const {
    return static_cast<int>(threadIdx.x % 32) >> log2_size;
  }  // of this thread's tile
  __device__ int slot() const { return static_cast<int>(threadIdx.x) & (size() - 1); }
  // The n-th set bit of `threads`, n being this thread's tile: hands each tile a thread of the set. 32 or
  // more when the set has fewer threads.
  __device__ std::uint32_t nth_thread(std::uint32_t threads) const {
    for (int t = index(); t > 0; --t) threads &= threads - 1;
    return static_cast<std::uint32_t>(__ffs(static_cast<int>(threads)) - 1);
  }
  // [warp] The bitwise or of `bits` over this thread's tile. All threads shuffle together: with a mask for
  // each tile, the tiles would run one after the other.
  __device__ __forceinline__ std::uint32_t reduce_or(std::uint32_t bits) const {
#pragma unroll
    for (int step = 0; step < 5; ++step) {
      if (step < log2_size) bits |= __shfl_xor_sync(~0u, bits, 1 << step);
    }
    return bits;
  }
  // The threads of tile `tile`, one bit each.
  __device__ std::uint32_t mask(int tile) const { return (~0u >> (32 - size())) << (tile << log2_size); }
};

}  // namespace ferry::cuda
