// A kernel's arguments where its functions may take their address.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/ptx.cuh"

namespace ferry::cuda {

// By the whole block: a copy in shared memory; a barrier follows. Arguments whose address is taken are
// otherwise read through the multiprocessor's first cache, which every acquire empties.
template <class T>
__device__ __forceinline__ void copy_to_shared(const T& arguments, T* copy) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0);
  const auto* from = reinterpret_cast<const std::uint64_t*>(&arguments);
  auto* to = reinterpret_cast<std::uint64_t*>(copy);
  for (unsigned i = threadIdx.x; i < sizeof(T) / 8; i += blockDim.x) to[i] = load_argument_word(from + i);
}

}  // namespace ferry::cuda
