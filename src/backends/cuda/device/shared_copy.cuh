// A kernel's arguments where its functions may take their address.
#pragma once

#include <cstdint>
#include <type_traits>

#include "backends/cuda/device/ptx.cuh"

namespace ferry::cuda {

// By `threads` threads: a copy in shared memory; a barrier follows. Arguments whose address is taken are
// otherwise read through the multiprocessor's first cache, which every acquire empties.
template <class T>
__device__ __forceinline__ void copy_to_shared(const T& arguments, T* copy, unsigned thread,
                                               unsigned threads) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0);
  const auto* from = reinterpret_cast<const std::uint64_t*>(&arguments);
  auto* to = reinterpret_cast<std::uint64_t*>(copy);
  for (unsigned i = thread; i < sizeof(T) / 8; i += threads) to[i] = load_argument_word(from + i);
}

// By the whole block: every line of a kernel's arguments has to come to the multiprocessor once; all at once,
// not one after the other.
template <class T>
__device__ __forceinline__ void fetch_lines(const T& arguments) {
  const auto* words = reinterpret_cast<const std::uint32_t*>(&arguments);
  for (unsigned line = threadIdx.x / 32; line < sizeof(T) / 64; line += blockDim.x / 32)
    asm volatile("" ::"r"(words[16 * line]));
}

}  // namespace ferry::cuda
