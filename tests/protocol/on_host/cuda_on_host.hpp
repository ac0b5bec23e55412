// Lets protocol code of kernels compile for the host, where the thread sanitizer sees it and a test can force
// interleavings. A host thread stands for a block whose threads all do the same.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "protocol/on_host/accesses.hpp"

#define __device__
#define __forceinline__ inline
#define __noinline__  // empty, because the standard library uses the name inside __attribute__

// --- the functions and variables of CUDA that the protocol uses ------------------------------------------

struct Index3 {
  unsigned x = 0;
};
inline constexpr Index3 threadIdx{}, blockIdx{};
inline constexpr Index3 blockDim{1};

// NOLINTBEGIN(bugprone-reserved-identifier)
inline void __syncwarp() {}
inline unsigned __ballot_sync(unsigned, bool value) {
  return value ? ~0u : 0;
}
inline bool __all_sync(unsigned, bool value) {
  return value;
}
inline bool __any_sync(unsigned, bool value) {
  return value;
}
inline int __ffs(int value) {
  return __builtin_ffs(value);
}
inline int __popc(int value) {
  return __builtin_popcount(static_cast<unsigned>(value));
}
inline void __nanosleep(unsigned) {
  std::this_thread::yield();
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(std::uint64_t{a} * b >> 32);
}
inline void __threadfence() {
  static std::atomic<int> word;
  word.fetch_add(0);  // the sanitizer understands it, unlike a fence
}
// NOLINTEND(bugprone-reserved-identifier)
inline long long clock64() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}
