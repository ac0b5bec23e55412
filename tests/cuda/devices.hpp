// The machine's devices, as tests use them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace ferry::test {

// How many there are. Asks in a forked process: this one has to stay able to fork ranks. Call it before the
// process uses CUDA.
int devices();

// A stream of the current device that waits for no other.
class OwnStream {
 public:
  OwnStream();
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  cudaStream_t get() const { return stream_; }
  void synchronize() const;

 private:
  cudaStream_t stream_ = nullptr;
};

// By a stream of its own, done on return.
void copy_bytes(void* to, const void* from, std::size_t bytes);

}  // namespace ferry::test

// For the start of a test that needs a GPU.
#define FERRY_NEED_DEVICES(count)                                                               \
  do {                                                                                          \
    if (::ferry::test::devices() < (count))                                                     \
      GTEST_SKIP() << "needs " << (count) << " GPU(s), there are " << ::ferry::test::devices(); \
  } while (false)
