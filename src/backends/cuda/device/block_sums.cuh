// Prefix sums over the threads of a block.
#pragma once

#include <cstdint>

namespace ferry::cuda {

// In shared memory. One call at a time.
template <int kThreads>
struct BlockSums {
  std::int32_t of_warp[kThreads / 32];

  // [block] The sum of `mine` over the threads before this one. `all`: over all threads.
  __device__ std::int32_t before(std::int32_t mine, std::int32_t* all) {
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
    std::int32_t sum = mine;  // grows to the sum over the warp's threads up to this one
    for (int step = 1; step < 32; step *= 2) {
      const std::int32_t lower = __shfl_up_sync(~0u, sum, static_cast<unsigned>(step));
      if (thread % 32 >= step) sum += lower;
    }
    if (thread % 32 == 31) of_warp[warp] = sum;
    __syncthreads();
    *all = 0;
    std::int32_t lower = 0;
    for (int other = 0; other < kThreads / 32; ++other) {
      if (other == warp) lower = *all;
      *all += of_warp[other];
    }
    __syncthreads();
    return lower + sum - mine;
  }
};

}  // namespace ferry::cuda
