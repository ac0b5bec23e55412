// Copies rows through registers: a warp moves granules of 512 bytes, 16 bytes a thread.
#pragma once

#include <cstdint>

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

}  // namespace ferry::cuda
