// The functions and variables of CUDA that kernels use, for the fibers of a Grid.
#pragma once

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels_on_host/grid.hpp"

#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__  // empty, because the standard library uses the name inside __attribute__
#define __global__
#define __grid_constant__
#define __shared__  // an array that a test defines, and Grid::give_each_block()
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

#define threadIdx (ferry::on_host::Index3{ferry::on_host::Grid::thread()})
#define blockIdx (ferry::on_host::Index3{ferry::on_host::Grid::block().index})
#define blockDim (ferry::on_host::Index3{ferry::on_host::Grid::block().threads})
#define gridDim (ferry::on_host::Index3{ferry::on_host::Grid::block().blocks})

using std::max;
using std::min;
namespace ferry::cuda {
using std::max;  // before the namespace ferry::max
using std::min;
}  // namespace ferry::cuda

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
template <class T>
T __shfl_sync(unsigned, T value, int thread) {
  static_assert(sizeof(T) <= 8);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = ferry::on_host::with_values(
      bits, [thread](const auto& values) { return values[static_cast<std::size_t>(thread) % 32]; });
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return __shfl_sync(~0u, value, static_cast<int>(threadIdx.x % 32) ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const auto thread = static_cast<int>(threadIdx.x % 32);
  return __shfl_sync(~0u, value, thread < distance ? thread : thread - distance);
}
template <class T>
T __shfl_down_sync(unsigned, T value, int distance) {
  const auto thread = static_cast<int>(threadIdx.x % 32);
  return __shfl_sync(~0u, value, thread + distance > 31 ? thread : thread + distance);
}
inline unsigned __match_any_sync(unsigned, std::int32_t value) {
  return ferry::on_host::with_values(static_cast<std::uint32_t>(value), [value](const auto& values) {
    unsigned same = 0;
    for (unsigned i = 0; i < 32; ++i)
      same |= static_cast<unsigned>(values[i] == static_cast<std::uint32_t>(value)) << i;
    return same;
  });
}
// The values of all threads of the warp, folded.
template <class T, class Fold>
T fold_of_warp(T value, Fold fold) {
  return ferry::on_host::with_values(static_cast<std::uint64_t>(value), [fold](const auto& values) {
    auto folded = static_cast<T>(values[0]);
    for (unsigned i = 1; i < 32; ++i) folded = fold(folded, static_cast<T>(values[i]));
    return folded;
  });
}
template <class T>
T __reduce_add_sync(unsigned, T value) {
  return fold_of_warp(value, [](T a, T b) { return a + b; });
}
template <class T>
T __reduce_min_sync(unsigned, T value) {
  return fold_of_warp(value, [](T a, T b) { return std::min(a, b); });
}
template <class T>
T __reduce_max_sync(unsigned, T value) {
  return fold_of_warp(value, [](T a, T b) { return std::max(a, b); });
}
template <class T>
T __reduce_or_sync(unsigned, T value) {
  return fold_of_warp(value, [](T a, T b) { return a | b; });
}
inline int __clz(int value) {
  return std::countl_zero(static_cast<unsigned>(value));
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
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fmaf_rn(float a, float b, float c) {
  return std::fma(a, b, c);
}
// Rounded down. For sums that double holds exactly.
inline float __fmaf_rd(float a, float b, float c) {
  const double exact = std::fma(double{a}, double{b}, double{c});
  const auto nearest = static_cast<float>(exact);
  return nearest > exact ? std::nextafter(nearest, -INFINITY) : nearest;
}
inline float __frcp_rn(float value) {
  return 1 / value;
}
inline std::uint32_t __float_as_uint(float value) {
  return std::bit_cast<std::uint32_t>(value);
}
// Bytes 0 to 3 are those of `low`, 4 to 7 those of `high`; each digit of `selector` chooses one.
inline std::uint32_t __byte_perm(std::uint32_t low, std::uint32_t high, std::uint32_t selector) {
  const std::uint64_t both = std::uint64_t{high} << 32 | low;
  std::uint32_t chosen = 0;
  for (unsigned i = 0; i < 4; ++i)
    chosen |= static_cast<std::uint32_t>(both >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return chosen;
}
// The larger of each pair of 16-bit numbers.
inline std::uint32_t __vmaxu2(std::uint32_t a, std::uint32_t b) {
  return std::max(a & 0xffff0000, b & 0xffff0000) | std::max(a & 0xffff, b & 0xffff);
}
inline void __threadfence() {}  // one host thread
// NOLINTEND(bugprone-reserved-identifier)
inline long long clock64() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}
