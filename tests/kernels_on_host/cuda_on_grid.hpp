// The functions and variables of CUDA that kernels use, for the fibers of a Grid.
#pragma once

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>

#include "kernels_on_host/grid.hpp"

#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__  // empty, because the standard library uses the name inside __attribute__

#define threadIdx (ferry::on_host::Index3{ferry::on_host::Grid::thread()})
#define blockIdx (ferry::on_host::Index3{ferry::on_host::Grid::block().index})
#define blockDim (ferry::on_host::Index3{ferry::on_host::Grid::block().threads})
#define gridDim (ferry::on_host::Index3{ferry::on_host::Grid::block().blocks})

using std::max;
using std::min;

struct alignas(8) uint2 {
  std::uint32_t x, y;
};
struct alignas(16) uint4 {
  std::uint32_t x, y, z, w;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
inline uint2 make_uint2(std::uint32_t x, std::uint32_t y) {
  return {x, y};
}
inline uint4 make_uint4(std::uint32_t x, std::uint32_t y, std::uint32_t z, std::uint32_t w) {
  return {x, y, z, w};
}

// NOLINTBEGIN(bugprone-reserved-identifier)
inline void __syncthreads() {
  ferry::on_host::Grid::block().barrier.wait(true);
}
inline int __syncthreads_or(int flag) {
  return ferry::on_host::Grid::block().barrier.wait(flag != 0).any ? 1 : 0;
}
inline int __syncthreads_and(int flag) {
  return ferry::on_host::Grid::block().barrier.wait(flag != 0).all ? 1 : 0;
}
inline void __syncwarp() {
  ferry::on_host::Grid::warp().barrier.wait(true);
}
inline unsigned __ballot_sync(unsigned, bool value) {
  return ferry::on_host::with_values(value ? 1 : 0, [](const auto& values) {
    unsigned ballot = 0;
    for (unsigned i = 0; i < 32; ++i) ballot |= static_cast<unsigned>(values[i]) << i;
    return ballot;
  });
}
inline bool __all_sync(unsigned, bool value) {
  return __ballot_sync(~0u, value) == ~0u;
}
inline bool __any_sync(unsigned, bool value) {
  return __ballot_sync(~0u, value) != 0;
}
inline std::int64_t __shfl_sync(unsigned, std::int64_t value, int thread) {
  return ferry::on_host::with_values(static_cast<std::uint64_t>(value), [thread](const auto& values) {
    return static_cast<std::int64_t>(values[static_cast<std::size_t>(thread % 32)]);
  });
}
// Values of four bytes.
template <class Value>
Value __shfl_xor_sync(unsigned, Value value, int mask) {
  const auto mine = std::bit_cast<std::uint32_t>(value);
  const auto read = [mask](const auto& values) {
    return static_cast<std::uint32_t>(
        values[(ferry::on_host::Grid::thread() % 32) ^ static_cast<unsigned>(mask)]);
  };
  return std::bit_cast<Value>(ferry::on_host::with_values(mine, read));
}
inline int __ffs(int value) {
  return __builtin_ffs(value);
}
inline int __popc(int value) {
  return __builtin_popcount(static_cast<unsigned>(value));
}
inline void __nanosleep(unsigned) {
  ferry::on_host::Grid::yield();
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(std::uint64_t{a} * b >> 32);
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fmaf_rn(float a, float b, float c) {
  return std::fma(a, b, c);
}
inline void __threadfence() {}  // one host thread
// NOLINTEND(bugprone-reserved-identifier)
inline long long clock64() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}
