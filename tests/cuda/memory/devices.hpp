// The machine's GPUs, for tests of single classes of the CUDA backend.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "harness/test_stream.hpp"

namespace ferry::test {

using contract::TestStream;

// The number of GPUs. Asks the driver in a forked process, because this process must remain able to fork
// ranks. Call it before the process uses CUDA.
int device_count();

// Synchronous, on a stream of its own.
void copy_bytes(void* to, const void* from, std::size_t bytes);

}  // namespace ferry::test

// For the start of a test that needs `count` GPUs.
#define FERRY_SKIP_WITHOUT_DEVICES(count)                                                            \
  do {                                                                                               \
    if (::ferry::test::device_count() < (count))                                                     \
      GTEST_SKIP() << "needs " << (count) << " GPU(s), there are " << ::ferry::test::device_count(); \
  } while (false)
