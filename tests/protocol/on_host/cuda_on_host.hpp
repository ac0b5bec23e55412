// Lets protocol code of kernels compile for the host, where the thread sanitizer sees it and a test can force
// interleavings. A host thread stands for a block whose threads all do the same.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <type_traits>

#define __device__
#define __forceinline__ inline
#define __noinline__  // empty, because the standard library uses the name inside __attribute__

namespace ferry::on_host {

// A test's hook in the calling thread: runs before each access to a word that threads share. The hook is not
// run for the accesses that it makes itself.
inline thread_local std::function<void()> before_access;

inline void step() {
  if (!before_access) return;
  std::function<void()> hook;
  hook.swap(before_access);
  hook();
  hook.swap(before_access);
}

// The width of the accesses to every word, by its address.
class AccessWidths {
 public:
  void note(const void* address, int bytes) {
    const std::lock_guard lock(mutex_);
    for (int at = 0; at < bytes; at += 8) {
      std::set<int>& widths = widths_[static_cast<const char*>(address) + at];
      widths.insert(bytes);
      mixed_ = mixed_ || widths.size() > 1;
    }
  }
  bool mixed() const { return mixed_; }
  void reset() {
    widths_.clear();
    mixed_ = false;
  }

 private:
  std::mutex mutex_;
  std::map<const void*, std::set<int>> widths_;
  bool mixed_ = false;
};
inline AccessWidths access_widths;

}  // namespace ferry::on_host

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

template <class Word>
Word atomicExch(Word* word, std::type_identity_t<Word> value) {
  ferry::on_host::step();
  return std::atomic_ref(*word).exchange(value, std::memory_order_relaxed);
}
template <class Word>
Word atomicAdd(Word* word, std::type_identity_t<Word> value) {
  ferry::on_host::step();
  return std::atomic_ref(*word).fetch_add(value, std::memory_order_relaxed);
}
template <class Word>
Word atomicMin(Word* word, std::type_identity_t<Word> value) {
  ferry::on_host::step();
  std::atomic_ref at(*word);
  Word seen = at.load(std::memory_order_relaxed);
  while (value < seen && !at.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
  return seen;
}
inline unsigned atomicInc(unsigned* word, unsigned most) {
  ferry::on_host::step();
  std::atomic_ref at(*word);
  unsigned seen = at.load(std::memory_order_relaxed);
  while (!at.compare_exchange_weak(seen, seen >= most ? 0 : seen + 1, std::memory_order_relaxed)) {
  }
  return seen;
}
