// A value in memory that a test shares with the processes of its ranks.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <new>

#include "runtime/support.hpp"

namespace ferry::test {

template <class T>
class SharedValue {
 public:
  SharedValue()
      : value_(new(mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) T{}) {
  }
  ~SharedValue() { munmap(value_, sizeof(T)); }
  T& operator*() const { return *value_; }
  T* operator->() const { return value_; }

 private:
  T* value_;
};

// Returns when `count` ranks have counted themselves, however long a busy machine makes them take; after 30 s
// in any case.
inline void await_ranks(const SharedValue<std::atomic<int>>& counter, int count) {
  const Stopwatch watch;
  while (*counter < count && watch.seconds() < 30) sleep_seconds(0.01);
}

}  // namespace ferry::test
