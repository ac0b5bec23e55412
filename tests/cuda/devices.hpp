// The machine's devices, as tests use them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "backends/cuda/host/cuda_stream.hpp"

namespace ferry::test {

// How many there are. Asks in a forked process: this one has to stay able to fork ranks. Call it before the
// process uses CUDA.
int devices();

using OwnStream = cuda::CudaStream;

// By a stream of its own, done on return.
void copy_bytes(void* to, const void* from, std::size_t bytes);

}  // namespace ferry::test

// For the start of a test that needs a GPU.
#define FERRY_NEED_DEVICES(count)                                                               \
  do {                                                                                          \
    if (::ferry::test::devices() < (count))                                                     \
      GTEST_SKIP() << "needs " << (count) << " GPU(s), there are " << ::ferry::test::devices(); \
  } while (false)
