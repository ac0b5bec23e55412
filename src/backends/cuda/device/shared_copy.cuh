// Brings a kernel's arguments close to the threads: copies them to shared memory, or prefetches their cache
// lines.
#pragma once

#include <cstdint>
#include <type_traits>

#include "backends/cuda/device/ptx.cuh"

namespace ferry::cuda {

// [block] Copies arguments to shared memory, by `threads` threads; call __syncthreads() before the copy is
// read. Arguments whose address is taken are otherwise read through the L1 cache, which every acquire
// invalidates.
template <class T>
__device__ __forceinline__ void copy_to_shared(const T& arguments, T* copy, unsigned thread,
                                               unsigned threads) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0);
  const auto* from = reinterpret_cast<const std::uint64_t*>(&arguments);
  auto* to = reinterpret_cast<std::uint64_t*>(copy);
  for (unsigned i = thread; i < sizeof(T) / 8; i += threads) to[i] = load_argument_word(from + i);
}

// [block] Loads every cache line of a kernel's arguments at once. Left to first use, the lines would arrive
// one after the other.
template <class T>
__device__ __forceinline__ void fetch_lines(const T& arguments) {
  const auto* words = reinterpret_cast<const std::uint32_t*>(&arguments);
  for (unsigned line = threadIdx.x / 32; line < sizeof(T) / 64; line += blockDim.x / 32)
    asm volatile("" ::"r"(words[16 * line]));
}

}  // namespace ferry::cuda
