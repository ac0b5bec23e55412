// A value in memory that a test shares with the processes of its ranks.
#pragma once

#include <sys/mman.h>

#include <new>

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

}  // namespace ferry::test
