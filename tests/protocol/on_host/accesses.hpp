// Accesses to the words that threads share, where kernel code is compiled for the host: a test's hook before
// each, the widths of all, and CUDA's atomic functions.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <type_traits>

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

// --- CUDA's atomic functions ---------------------------------------------------------------------------

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
template <class Word>
Word atomicMax(Word* word, std::type_identity_t<Word> value) {
  ferry::on_host::step();
  std::atomic_ref at(*word);
  Word seen = at.load(std::memory_order_relaxed);
  while (value > seen && !at.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
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
